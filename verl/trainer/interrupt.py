"""Ctrl-C that loses no work."""

import signal
from collections.abc import Callable
from typing import Protocol


class Stoppable(Protocol):
    """A loop that looks at `stop_requested` after each step."""

    stop_requested: bool
    note: Callable[[str], None]


class Interrupt:
    """First Ctrl-C: finish the step, save, stop. Second: the usual KeyboardInterrupt."""

    def __init__(self, run: Stoppable):
        self.run = run

    def __enter__(self) -> None:
        try:
            self.previous = signal.signal(signal.SIGINT, self.request_stop)
        except ValueError:  # not the main thread: its caller decides about signals
            self.previous = None

    def request_stop(self, *_: object) -> None:
        self.run.stop_requested = True
        self.run.note("stopping after this step (press Ctrl-C again to stop at once)")
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGINT, self.previous)
