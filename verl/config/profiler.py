"""Profiling: which tool, which steps, which ranks of which roles."""

import shlex
from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean

TOOLS = ("nsys", "npu", "torch", "torch_memory", "precision_debugger")
_TORCH_CONTENTS = ("cpu", "cuda", "memory", "shapes", "stack", "module")
_NPU_CONTENTS = ("cpu", "npu", "memory", "shapes", "stack", "module")
_FOLDER = "Folder for the profiles, on the machine of each rank."
_HOOK = (
    "Command that is run once after the last profiled step, without a shell; environment VERL_PROFILE_SAVE_PATH, "
    "_TOOL, _RANK, _PID, _ROLE and _RAY_NSIGHT_DIR."
)
_RELOCATE = "Move the reports of nsys and of rollout servers into save_path after each profile."
_HOOK_ALL, _HOOK_RANKS = "Run the command on every profiled rank.", "Ranks that run it; [] is rank 0."


@dataclass(frozen=True, kw_only=True)
class TorchScheduleConfig(Section):
    """Which mini-batches of the updates are recorded, in cycles of wait, warmup and active ones."""

    skip_first: int = key(0, "Mini-batches before the first cycle.", minimum=0)
    wait: int = key(0, "Mini-batches of a cycle that are not recorded.", minimum=0)
    warmup: int = key(0, "Mini-batches of a cycle in which the profiler warms up.", minimum=0)
    active: int = key(0, "Mini-batches of a cycle that are recorded; 0 turns the schedule off.", minimum=0)
    repeat: int = key(0, "Cycles; 0 is until the step ends.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class TorchToolConfig(Section):
    """torch.profiler."""

    contents: list[str] = key(
        [], f"What is recorded: {', '.join(_TORCH_CONTENTS)}; [] is the operators of CPU and device."
    )
    discrete: bool = key(False, "One trace for each stage in place of one for the step.")
    schedule: TorchScheduleConfig = section(TorchScheduleConfig)


@dataclass(frozen=True, kw_only=True)
class TorchMemoryToolConfig(Section):
    """Snapshots of the device's allocator."""

    trace_alloc_max_entries: int = key(100000, "Allocations that are kept.", minimum=1)
    stack_depth: int = key(32, "0 keeps no stack; how deep the others are is decided by torch.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class NsysToolConfig(Section):
    """NVIDIA Nsight Systems."""

    discrete: bool = key(False, "One range, and so one report, for each stage in place of one for the step.")


@dataclass(frozen=True, kw_only=True)
class NPUToolConfig(Section):
    """The profiler of torch_npu."""

    contents: list[str] = key([], f"What is recorded: {', '.join(_NPU_CONTENTS)}; [] is the operators of CPU and NPU.")
    level: str = key(
        "level0", "How much of the device is recorded.", choices=("level_none", "level0", "level1", "level2")
    )
    analysis: bool = key(True, "Parse the raw data when a profile ends.")
    discrete: bool = key(False, "One profile for each stage in place of one for the step.")


@dataclass(frozen=True, kw_only=True)
class ToolConfig(Section):
    """Settings of the tools; those of `tool` are used."""

    nsys: NsysToolConfig = section(NsysToolConfig)
    npu: NPUToolConfig = section(NPUToolConfig)
    torch: TorchToolConfig = section(TorchToolConfig)
    torch_memory: TorchMemoryToolConfig = section(TorchMemoryToolConfig)


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig(Section):
    """Profiling of one role."""

    tool: str | None = key(None, "Profiler; null is off.", choices=TOOLS)
    enable: bool = key(False, "Profile this role.")
    all_ranks: bool = key(False, "Profile every rank of the role.")
    ranks: list[int] = key([], "Ranks to profile when not all of them.")
    save_path: str | None = key("outputs/profile", _FOLDER)
    relocate_results: bool = key(False, _RELOCATE)
    finish_hook_cmd: str | None = key(None, _HOOK)
    finish_hook_all_ranks: bool = key(False, _HOOK_ALL)
    finish_hook_ranks: list[int] = key([], _HOOK_RANKS)
    tool_config: ToolConfig = section(ToolConfig)

    def check(self, path: str) -> None:
        """ConfigError for a profiler that would record nothing, or asks for what its tool does not record."""
        if not self.enable or self.tool is None:
            return
        if not self.all_ranks and not self.ranks:
            raise ConfigError(
                f"{path}.enable=True profiles no rank; set {path}.all_ranks=True, or {path}.ranks=[0] for the first"
            )
        for tool, allowed in (("torch", _TORCH_CONTENTS), ("npu", _NPU_CONTENTS)):
            for name in getattr(self.tool_config, tool).contents:
                if name not in allowed:
                    raise ConfigError(f"{path}.tool_config.{tool}.contents has {name!r}; {did_you_mean(name, allowed)}")
        if self.finish_hook_cmd is not None:
            try:
                shlex.split(self.finish_hook_cmd)
            except ValueError as error:
                raise ConfigError(f"{path}.finish_hook_cmd={self.finish_hook_cmd!r} is no command: {error}") from error


@dataclass(frozen=True, kw_only=True)
class GlobalNsysConfig(NsysToolConfig):
    """NVIDIA Nsight Systems: options of `nsys profile`, each `--name=value`; null keeps a default."""

    controller_nsight_options: dict[str, Any] = key({}, "Options for the driver, beside the defaults.")
    worker_nsight_options: dict[str, Any] = key({}, "Options for the ranks, beside the defaults.")


@dataclass(frozen=True, kw_only=True)
class GlobalTorchMemoryConfig(TorchMemoryToolConfig):
    """Snapshots of the device's allocator."""

    context: str = key("all", "Of which events the stack is kept.", choices=("state", "alloc", "all"))
    stacks: str = key("all", "Which frames a stack has.", choices=("python", "all"))


@dataclass(frozen=True, kw_only=True)
class GlobalToolConfig(Section):
    """Settings of the tools for the whole run."""

    nsys: GlobalNsysConfig = section(GlobalNsysConfig)
    torch_memory: GlobalTorchMemoryConfig = section(GlobalTorchMemoryConfig)


@dataclass(frozen=True, kw_only=True)
class GlobalProfilerConfig(Section):
    """Profiling of the whole run; the default of every role."""

    tool: str | None = key(None, "Profiler; null is off.", choices=TOOLS)
    steps: list[int] | None = key(None, "Training steps to profile, from 1; null is none.")
    profile_continuous_steps: bool = key(False, "Consecutive steps are one profile.")
    save_path: str = key("outputs/profile", _FOLDER)
    relocate_results: bool = key(False, _RELOCATE)
    finish_hook_cmd: str | None = key(None, _HOOK)
    finish_hook_all_ranks: bool = key(False, _HOOK_ALL)
    finish_hook_ranks: list[int] = key([], _HOOK_RANKS)
    global_tool_config: GlobalToolConfig = section(GlobalToolConfig)
