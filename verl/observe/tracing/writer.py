"""Writes traces in a thread of its own, so that a slow or broken backend neither delays a run nor ends it."""

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from verl.observe.tracing.spans import Span
from verl.observe.trackers import RunInfo

MAX_WAITING = 1000  # traces that wait to be written; more are left out
CLOSE_S = 30.0  # how long the end of a run waits for them
Note = Callable[[str], object]


class TraceBackend(Protocol):
    """Where traces go. Its methods are called by one thread, and may raise."""

    def write(self, root: Span) -> None: ...
    def close(self) -> None: ...


class TraceWriter:
    """Hands traces to the backend that `build` makes. What fails is said once and counted."""

    def __init__(self, name: str, build: Callable[[RunInfo], TraceBackend], run: RunInfo, note: Note):
        self.name, self.build, self.run, self.note = name, build, run, note
        self.num_given = self.num_written = 0
        self._said: set[str] = set()
        self._waiting: queue.Queue[Span | None] = queue.Queue(MAX_WAITING)
        self._backend: TraceBackend | None = None
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._closed = threading.Event()

    def put(self, root: Span) -> None:
        """Write a complete trace soon."""
        self.num_given += 1
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._waiting.put_nowait(root)
        except queue.Full:
            self._warn("slow", f"is slower than the run, and {MAX_WAITING} traces wait: newer ones are left out")

    def close(self) -> None:
        """Wait for what is under way, at most CLOSE_S, and say how many traces were not written."""
        if self._closed.is_set():
            return
        self._closed.set()
        if self._thread.ident is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if lost := self.num_given - self.num_written:
            self.note(f"warning: {lost} traces did not reach {self.name}; {self.num_written} did")

    def _work(self) -> None:
        try:
            self._backend = self.build(self.run)
        except (Exception, SystemExit) as error:  # of any library
            self._warn("start", f"could not start: {_told(error)}; nothing is traced")
        while (root := self._waiting.get()) is not None:
            self._write(root)
        if self._backend is not None:
            try:
                self._backend.close()
            except (Exception, SystemExit) as error:
                self._warn("write", f"failed: {_told(error)}")

    def _write(self, root: Span) -> None:
        if self._backend is None:
            return
        try:
            self._backend.write(root)
            self.num_written += 1
        except (Exception, SystemExit) as error:
            self._warn("write", f"failed: {_told(error)}; the run goes on, and this is said once")

    def _warn(self, about: str, text: str) -> None:
        if about not in self._said:
            self._said.add(about)
            self.note(f"warning: rollout.trace.backend={self.name} {text}")


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
