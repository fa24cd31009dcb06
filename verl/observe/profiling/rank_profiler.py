"""The profiler of one rank: it records the chosen steps, its stages as slices, and runs the command at the end."""

import contextlib
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl.config import RunConfig
from verl.config.profiler import GlobalTorchMemoryConfig, ProfilerConfig
from verl.observe.profiling.tools import ProfilerTool, build_tool
from verl.observe.profiling.traces import Slice

WHOLE_STEP = "step"  # the stage around all others
RAY_NSIGHT = Path("/tmp/ray/session_latest/logs/nsight")
HOOK_LIMIT_S = 600.0  # after which the command is ended
_SECTIONS = ("actor", "critic", "reference", "rollout")  # of several roles on a rank, the first that is enabled decides
_tools: list[ProfilerTool] = []  # the one of this process, if it has one


def mini_batch_done() -> None:
    """Tell the profiler of this process that an update has ended; without one it costs nothing."""
    for tool in _tools:
        tool.mini_batch_done()


def slice_of_process(name: str) -> AbstractContextManager[Any]:
    """A slice in the profile of this process; without a profiler, nothing."""
    return _tools[0].stage(name) if _tools else contextlib.nullcontext()


def settings_of(config: RunConfig, roles: Sequence[str]) -> tuple[str, ProfilerConfig] | None:
    """The role that decides how the ranks which hold `roles` are profiled, and its settings; None where none is."""
    arr = config.actor_rollout_ref
    found: dict[str, Any] = {"actor": arr.actor, "critic": config.critic, "reference": arr.ref, "rollout": arr.rollout}
    for name in _SECTIONS:
        profiler = found[name].profiler
        if name in roles and profiler.enable and profiler.tool is not None:
            return name, profiler
    return None


def selects(settings: ProfilerConfig, rank: int) -> bool:
    """Whether `settings` profile `rank`."""
    return settings.tool is not None and settings.enable and (settings.all_ranks or rank in settings.ranks)


class RankProfiler:
    """Records on one rank what the driver asks for. Without `settings` that select `rank`, its methods do nothing.

    A failure to write a profile is told, and does not end the run.
    """

    def __init__(
        self,
        settings: ProfilerConfig | None,
        role: str = "",
        rank: int = 0,
        memory: GlobalTorchMemoryConfig | None = None,
    ):
        self.role, self.rank = role, rank
        self.settings = settings if settings is not None and selects(settings, rank) else None
        self.tool: ProfilerTool | None = None
        self.hook: tuple[list[str], dict[str, str]] | None = None  # its words and its variables
        self.root, self.folder, self.stages = Path(), Path(), list[AbstractContextManager[Any]]()
        self.written: list[Path] = []
        self.began: tuple[int, str, int] | None = None  # the stage of a `discrete` profile: its depth, name and time
        if self.settings is not None:
            name = str(self.settings.tool)
            if name == "torch" and os.environ.get("VERL_KEEP_NVTX_INJECTION") != "1":
                os.environ.pop("NVTX_INJECTION64_PATH", None)  # of another profiler: CUPTI serves one
            self.tool = build_tool(name, self.settings.tool_config, memory)
            of_tools = self.settings.tool_config
            of_stages = {"nsys": of_tools.nsys.discrete, "npu": of_tools.npu.discrete, "torch": of_tools.torch.discrete}
            self.discrete = of_stages.get(name, False)
            self.root = Path(self.settings.save_path or "outputs/profile").absolute()
            self.hook = self._hook(self.settings)
            self.relocates = name == "nsys" and self.settings.relocate_results
            _tools[:] = [self.tool]

    @classmethod
    def of(cls, config: RunConfig, roles: Sequence[str], rank: int) -> "RankProfiler":
        """The profiler of a rank with these `roles`."""
        role, settings = settings_of(config, roles) or ("", None)
        return cls(settings, role, rank, config.global_profiler.global_tool_config.torch_memory)

    def begin(self, name: str) -> None:
        """Record from here on; `name` is the folder of the step or steps."""
        if self.tool is not None:
            self.folder = self.root / name
            self.folder.mkdir(parents=True, exist_ok=True)
            self.stages, self.written = [], []
            if not self.discrete:
                self.tool.start(self._target())

    def enter(self, stage: str) -> None:
        """Begin a slice, and with `discrete` a profile where only the step is around it."""
        if self.tool is not None:
            if self.discrete and stage != WHOLE_STEP and self.began is None:
                self.tool.start(self._target(f"_{stage}"))
                self.began = (len(self.stages), stage, time.time_ns())
            self.stages.append(self.tool.stage(stage))
            self.stages[-1].__enter__()

    def exit(self) -> None:
        """End the slice that began last."""
        if self.tool is not None and self.stages:
            self.stages.pop().__exit__(None, None, None)
            if self.began is not None and len(self.stages) == self.began[0]:
                (_, stage, start), self.began = self.began, None
                self.written += self.tool.stop([(stage, start, time.time_ns())])

    def end(self, driver: list[Slice]) -> list[str]:
        """Write the profile; returns the paths of the files, or what was wrong."""
        if self.tool is None:
            return []
        while self.stages:
            self.exit()
        try:
            if not self.discrete:
                self.written += self.tool.stop(driver)
            if self.relocates:
                self.written += relocated(nsys_reports(os.getpid()), self.folder)
        except (OSError, RuntimeError) as error:
            return [f"the profile of {self.role} rank {self.rank} could not be written: {error}"]
        return [str(path) for path in self.written]

    def run_hook(self) -> list[str]:
        """Run the command of the last profiled step, where this rank runs it; returns what was wrong."""
        if self.hook is None:
            return []
        words, variables = self.hook
        variables["VERL_PROFILE_RAY_NSIGHT_DIR"] = ray_nsight_folder() or ""
        what = f"profiler.finish_hook_cmd={shlex.join(words)} on {self.role} rank {self.rank}"
        try:
            options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": HOOK_LIMIT_S}
            done = subprocess.run(words, env=os.environ | variables, **options)
        except (OSError, subprocess.TimeoutExpired) as error:
            return [f"{what} failed: {error}"]
        if done.returncode:
            return [f"{what} ended with exit code {done.returncode}: {(done.stderr or done.stdout)[-500:].strip()}"]
        return []

    def _hook(self, settings: ProfilerConfig) -> tuple[list[str], dict[str, str]] | None:
        runs_here = settings.finish_hook_all_ranks or self.rank in (settings.finish_hook_ranks or [0])
        if settings.finish_hook_cmd is None or not runs_here:
            return None
        variables = {
            "VERL_PROFILE_SAVE_PATH": str(self.root),
            "VERL_PROFILE_TOOL": str(settings.tool),
            "VERL_PROFILE_RANK": str(self.rank),
            "VERL_PROFILE_PID": str(os.getpid()),
            "VERL_PROFILE_ROLE": self.role,
        }
        return shlex.split(settings.finish_hook_cmd), variables

    def _target(self, more: str = "") -> Path:
        return self.folder / f"{self.role}_rank{self.rank}{more}"


def nsys_reports(process: int) -> list[Path]:
    """The reports of nsys for the rank `process`, in the folder that Ray or VERL_NSYS_REPORTS names."""
    folders = [ray_nsight_folder(), os.environ.get("VERL_NSYS_REPORTS")]
    return [file for folder in folders if folder for file in sorted(Path(folder).glob(f"*_{process}.*nsys-rep"))]


def relocated(files: Sequence[Path], folder: Path) -> list[Path]:
    """The paths of `files` once they are moved into `folder`."""
    return [Path(shutil.move(file, folder / file.name)) for file in files]


def ray_nsight_folder() -> str | None:
    """Where nsys writes the reports of Ray's actors on this node; None where there is none."""
    return str(RAY_NSIGHT) if RAY_NSIGHT.is_dir() else None
