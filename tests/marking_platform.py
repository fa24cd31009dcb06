"""A CPU that notes what a device's profiler would be told; `VERL_USE_EXTERNAL_MODULES=tests.marking_platform`."""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.standin_nsys import note
from verl.plugin.platform import PlatformCPU, PlatformRegistry


@PlatformRegistry.register("marking-cpu")
class MarkingCPU(PlatformCPU):
    @property
    def vendor_name(self) -> str:
        return "marking-cpu"

    def profiler_start(self) -> None:
        note("start")

    def profiler_stop(self) -> None:
        note("stop")

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        note("range", msg)
        yield
