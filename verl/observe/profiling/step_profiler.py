"""Profiling of chosen steps from the driver: it starts and stops the ranks' profilers, and records its own stages."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from verl.observe.profiling.traces import Slice
from verl.observe.timers import StageTimer

Broadcast = Callable[..., list[Any]]  # calls a method of every rank's worker


class ProfiledServers(Protocol):
    """Rollout servers that have profilers of their own."""

    def start(self, name: str) -> list[str]:
        """Begin to record; what was wrong."""

    def stop(self, name: str) -> list[str]:
        """End; the paths of the files, or what was wrong."""


class StepProfiler:
    """Records `steps` on the ranks that their own settings select; consecutive steps are one profile, if `together`."""

    def __init__(
        self,
        steps: list[int],
        together: bool,
        broadcast: Broadcast,
        note: Callable[[str], None],
        servers: ProfiledServers | None = None,
        on_written: Callable[[str, list[str]], object] = lambda name, files: None,
    ):
        self.steps, self.together = set(steps), together
        self.broadcast, self.note, self.servers, self.on_written = broadcast, note, servers, on_written
        self.slices: list[Slice] = []
        self._open: list[tuple[str, int]] = []
        self._cursor = 0  # where the last slice that `add` placed has ended
        self._name = ""  # of the profile in progress

    @contextlib.contextmanager
    def recorded(self, step: int, timer: StageTimer) -> Iterator[None]:
        """Records what runs inside, if `step` was chosen; `timer` gets the time that start and end take."""
        if step not in self.steps:
            yield
            return
        if not self._name:
            start = time.perf_counter()
            self._begin(step)
            timer.add("start_profile", time.perf_counter() - start)
        with timer.recorded_by(self):
            yield  # after an error the ranks may be gone
        if not (self.together and step + 1 in self.steps):
            start = time.perf_counter()
            self._end()
            timer.add("stop_profile", time.perf_counter() - start)
            if step == max(self.steps):
                self.finish()

    def finish(self) -> None:
        """After the last profiled step, or where the run ends before it: end what records, and run the commands."""
        if self._name:
            self._end()
        if self.steps:
            self.steps = set()
            for line in self._all("run_hook"):
                self.note(f"warning: {line}")

    # --- stages, from the timer --------------------------------------------------------------------------------------

    def enter(self, stage: str) -> None:
        """A stage begins, on all ranks."""
        self.broadcast("profiler.enter", stage)
        self._open.append((stage, time.time_ns()))
        self._cursor = self._open[-1][1]

    def exit(self) -> None:
        """The stage that began last ends."""
        stage, start = self._open.pop()
        self.slices.append((stage, start, time.time_ns()))
        self.broadcast("profiler.exit")

    def add(self, stage: str, seconds: float) -> None:
        """A stage that was measured elsewhere: a slice after the last one, inside the stage in progress."""
        end = min(self._cursor + int(1e9 * seconds), time.time_ns())
        self.slices.append((stage, self._cursor, end))
        self._cursor = end

    def _begin(self, step: int) -> None:
        last = step
        while self.together and last + 1 in self.steps:
            last += 1
        self._name = f"step_{step}" if last == step else f"steps_{step}_{last}"
        self.slices = []
        self.broadcast("profiler.begin", self._name)
        for line in self.servers.start(self._name) if self.servers else ():
            self.note(f"warning: {line}")

    def _end(self) -> None:
        name, self._name = self._name, ""
        written = self._all("end", self.slices) + (self.servers.stop(name) if self.servers else [])
        self.on_written(name, [line for line in written if os.path.isabs(line)])
        self.note(f"profile of {name}: {', '.join(written) or 'nothing was written'}")

    def _all(self, method: str, *args: Any) -> list[str]:
        return [line for lines in self.broadcast(f"profiler.{method}", *args) for line in lines]
