"""Profiling where published workers import it: slices of their own, timers, and lines about memory.

`DistProfiler` records with the tools of this library; the settings are those of `<role>.profiler`.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from verl.config.profiler import ProfilerConfig
from verl.observe.profiling.rank_profiler import RankProfiler, slice_of_process
from verl.observe.timers import StageTimer
from verl.plugin.platform import get_platform

F = TypeVar("F", bound=Callable[..., Any])
_GIB = 1 << 30


def mark_annotate(message: str | None = None, **_: Any) -> Callable[[F], F]:
    """Decorator: each call is a slice named `message`, or as the function is. Colours and domains are ignored."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with slice_of_process(message or function.__name__):
                return function(*args, **kwargs)

        return marked  # type: ignore[return-value]

    return decorate


def mark_start_range(message: str | None = None, **_: Any) -> AbstractContextManager[Any]:
    """Begin a slice; `mark_end_range` gets what this returns."""
    started = slice_of_process(message or "range")
    started.__enter__()
    return started


def mark_end_range(started: AbstractContextManager[Any]) -> None:
    """End a slice that `mark_start_range` began."""
    started.__exit__(None, None, None)


@contextmanager
def simple_timer(name: str, timing_raw: dict[str, float]) -> Iterator[None]:
    """Adds the seconds of the block to `timing_raw[name]`."""
    timer = StageTimer()
    with timer(name):
        yield
    timing_raw[name] = timing_raw.get(name, 0.0) + timer.seconds[name]


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *_: Any, **__: Any) -> Iterator[None]:
    """`simple_timer` around a slice of the same name."""
    with simple_timer(name, timing_raw), slice_of_process(name):
        yield


def log_gpu_memory_usage(head: str, logger: logging.Logger | None = None, level: int = 10, rank: int = 0) -> None:
    """Log `head` with the peak memory of this process's device, or print it without a logger; every rank that calls."""
    del rank
    platform = get_platform()
    peaks = [f"{size / _GIB:.2f} GiB" for size in platform.peak_memory()]
    line = f"{head}, peak memory (allocated, reserved): {', '.join(peaks)}; "
    line += f"in use on the device: {platform.device_memory_used() / _GIB:.2f} GiB"
    print(line) if logger is None else logger.log(level, line)


class GPUMemoryLogger:
    """Decorator: logs the memory before and after each call."""

    def __init__(self, role: str, logger: logging.Logger | None = None, level: int = 10, log_only_rank_0: bool = True):
        self.role, self.logger, self.level = role, logger, level
        del log_only_rank_0

    def __call__(self, function: F) -> F:
        @functools.wraps(function)
        def logged(*args: Any, **kwargs: Any) -> Any:
            for_call = f"{self.role} {function.__name__}"
            log_gpu_memory_usage(f"before {for_call}", self.logger, self.level)
            result = function(*args, **kwargs)
            log_gpu_memory_usage(f"after {for_call}", self.logger, self.level)
            return result

        return logged  # type: ignore[return-value]


class DistProfiler:
    """Records between `start` and `stop` on the ranks that `config` selects, under the name `role`."""

    annotate = staticmethod(mark_annotate)

    def __init__(self, rank: int, config: ProfilerConfig | None = None, tool_config: Any = None, **_: Any):
        del tool_config  # `config.tool_config` is read
        self.profiler = RankProfiler(config, "worker", rank)

    def start(self, role: str | None = None, **_: Any) -> None:
        """Begin to record."""
        self.profiler.begin(role or "profile")

    def stop(self) -> list[str]:
        """Write the profile; the paths of its files."""
        return self.profiler.end([])


class DistProfilerExtension:
    """Base of workers whose profiler a driver starts and stops."""

    def __init__(self, profiler: DistProfiler):
        self.profiler = profiler

    def start_profile(self, **kwargs: Any) -> None:
        self.profiler.start(**kwargs)

    def stop_profile(self) -> None:
        self.profiler.stop()
