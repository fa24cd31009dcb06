"""Profiling: which tool, which steps, which roles."""

from dataclasses import dataclass

from verl.config.base import Section, key

_TOOLS = ("nsys", "npu", "torch", "torch_memory", "precision_debugger")


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig(Section):
    """Profiling of one role."""

    tool: str | None = key(None, "Profiler; null is off.", choices=_TOOLS)
    enable: bool = key(False, "Profile this role.")
    all_ranks: bool = key(False, "Profile every rank of the role.")
    ranks: list[int] = key([], "Ranks to profile when not all of them.")
    save_path: str | None = key("outputs/profile", "Folder for the profiles.")


@dataclass(frozen=True, kw_only=True)
class GlobalProfilerConfig(Section):
    """Profiling of the whole run; the default of every role."""

    tool: str | None = key(None, "Profiler; null is off.", choices=_TOOLS)
    steps: list[int] | None = key(None, "Training steps to profile; null is none.")
    save_path: str = key("outputs/profile", "Folder for the profiles.")
