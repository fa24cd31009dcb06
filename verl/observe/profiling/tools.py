"""The profilers that a rank can run, behind one interface."""

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl.config.profiler import GlobalTorchMemoryConfig, ToolConfig
from verl.observe.profiling.traces import Slice, move_trace
from verl.plugin.installed import has_module
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError


class ProfilerTool(ABC):
    """Records between `start` and `stop`; `target` is the file to write, without its ending."""

    @abstractmethod
    def start(self, target: Path) -> None:
        """Begin to record."""

    @abstractmethod
    def stop(self, driver: Sequence[Slice]) -> list[Path]:
        """End, and return the files that were written. `driver` has the driver's stages since `start`."""

    def stage(self, name: str) -> AbstractContextManager[Any]:
        """A named slice around what runs inside."""
        return contextlib.nullcontext()

    def mini_batch_done(self) -> None:  # noqa: B027  # only a schedule asks
        """An update has ended."""


class TorchTool(ProfilerTool):
    """torch.profiler: operators, kernels and stages of all threads, as a trace for Perfetto."""

    def __init__(self, settings: ToolConfig):
        self.contents, plan = set(settings.torch.contents), settings.torch.schedule
        self.schedule = plan if plan.active else None
        self.device = get_platform().device_name
        self.profile: Any = None
        self.target, self.cycles = Path(), list[Path]()

    def start(self, target: Path) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = {ProfilerActivity.CPU} if not self.contents or "cpu" in self.contents else set()
        if not self.contents or "cuda" in self.contents or not activities:
            activities.add(getattr(ProfilerActivity, self.device.upper(), ProfilerActivity.PrivateUse1))
        timing: dict[str, Any] = {}
        self.target, self.cycles = target, []
        if (plan := self.schedule) is not None:
            numbers = {name: plan[name] for name in ("skip_first", "wait", "warmup", "active", "repeat")}
            timing = {"schedule": schedule(**numbers), "on_trace_ready": self._end_cycle}
        self.profile = profile(
            activities=activities,
            record_shapes="shapes" in self.contents,
            profile_memory="memory" in self.contents,
            with_stack="stack" in self.contents,
            with_modules="module" in self.contents,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
            **timing,
        )
        self.profile.start()

    def stop(self, driver: Sequence[Slice]) -> list[Path]:
        self.profile.stop()
        if self.schedule is None:
            self._end_cycle(self.profile)
        written = []
        for number, exported in enumerate(self.cycles):
            cycle = f"_cycle{number}" if self.schedule else ""
            written.append(self.target.with_name(f"{self.target.name}{cycle}.json.gz"))
            move_trace(exported, written[-1], driver)
        self.profile = None
        return written

    def _end_cycle(self, profile: Any) -> None:
        exported = self.target.with_name(f"{self.target.name}.{len(self.cycles)}.json")
        profile.export_chrome_trace(str(exported))
        self.cycles.append(exported)

    def stage(self, name: str) -> AbstractContextManager[Any]:
        from torch.profiler import record_function

        return record_function(name)

    def mini_batch_done(self) -> None:
        if self.profile is not None and self.schedule is not None:
            self.profile.step()


class TorchMemoryTool(ProfilerTool):
    """The allocations of the device with their stacks, as a snapshot for pytorch.org/memory_viz."""

    def __init__(self, settings: ToolConfig, of_run: GlobalTorchMemoryConfig | None):
        self.settings, self.of_run = settings.torch_memory, of_run or GlobalTorchMemoryConfig()
        platform = get_platform()
        self.memory: Any = None if platform.device_name == "cpu" else platform.device_module.memory
        if self.memory is None:
            raise ConfigError(
                "tool=torch_memory records the allocator of a GPU or NPU, and this run has none; use tool=torch with "
                "contents of [cpu,memory] in its tool_config.torch"
            )
        self.target = Path()

    def start(self, target: Path) -> None:
        self.target, depth = target, self.settings.stack_depth
        self.memory._record_memory_history(
            context=self.of_run.context if depth else None,
            stacks=self.of_run.stacks,
            max_entries=self.settings.trace_alloc_max_entries,
        )

    def stop(self, driver: Sequence[Slice]) -> list[Path]:
        snapshot = self.target.with_name(self.target.name + ".pickle")
        self.memory._dump_snapshot(str(snapshot))
        self.memory._record_memory_history(enabled=None)
        return [snapshot]


class NsysTool(ProfilerTool):
    """Ranges for NVIDIA Nsight Systems, which this process was started under; it writes the reports itself."""

    def start(self, target: Path) -> None:
        get_platform().profiler_start()

    def stop(self, driver: Sequence[Slice]) -> list[Path]:
        get_platform().profiler_stop()
        return []

    def stage(self, name: str) -> AbstractContextManager[Any]:
        return get_platform().nvtx_range(name)


class NPUTool(ProfilerTool):
    """torch_npu's profiler: one folder a profile, which MindStudio opens."""

    def __init__(self, settings: ToolConfig):
        if not has_module("torch_npu"):
            raise ConfigError("tool=npu records with torch_npu, which is not installed; use tool=torch")
        self.settings, self.target = settings.npu, Path()
        self.profile: Any = None
        self.profiler = importlib.import_module("torch_npu").profiler

    def start(self, target: Path) -> None:
        contents, library = set(self.settings.contents), self.profiler
        level = getattr(library.ProfilerLevel, self.settings.level.capitalize())  # Level0, Level_none
        activities = [library.ProfilerActivity.CPU] * (not contents or "cpu" in contents)
        activities += [library.ProfilerActivity.NPU] * (not contents or "npu" in contents)
        self.target = target
        self.profile = library.profile(
            activities=activities or [library.ProfilerActivity.NPU],
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            with_stack="stack" in contents,
            with_modules="module" in contents,
            on_trace_ready=library.tensorboard_trace_handler(str(target), analyse_flag=self.settings.analysis),
            experimental_config=library._ExperimentalConfig(profiler_level=level),
        )
        self.profile.start()

    def stop(self, driver: Sequence[Slice]) -> list[Path]:
        self.profile.stop()
        return [self.target]

    def stage(self, name: str) -> AbstractContextManager[Any]:
        from torch.profiler import record_function

        return record_function(name)


def build_tool(name: str, settings: ToolConfig, of_run: GlobalTorchMemoryConfig | None) -> ProfilerTool:
    """The tool `name`; ConfigError where this machine cannot run it."""
    makers: dict[str, Callable[[], ProfilerTool]] = {
        "torch": lambda: TorchTool(settings),
        "torch_memory": lambda: TorchMemoryTool(settings, of_run),
        "nsys": NsysTool,
        "npu": lambda: NPUTool(settings),
    }
    return makers[name]()
