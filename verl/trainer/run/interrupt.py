"""Ctrl-C and SIGTERM handling that loses no work."""

import signal
from collections.abc import Callable
from typing import Any, Protocol

from verl.utils.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stoppable(Protocol):
    """A loop that looks at `stop_requested`, the number of a signal or 0, after each step."""

    stop_requested: int
    note: Callable[[str], None]


class BeforeFirstStep:
    """While a run loads, checks and validates: Ctrl-C or SIGTERM end it at once, as Interrupted. Its ranks end with it.

    `when` says what was done by then: once `Interrupt` takes over, a signal outside of it comes after the last step.
    """

    def __init__(self) -> None:
        self.number, self.when = 0, "before the first step; nothing was saved"
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        try:
            self.previous = {number: signal.signal(number, self.stop) for number in SIGNALS}
        except ValueError:  # not the main thread: the caller handles signals
            self.previous = {}

    def stop(self, number: int, *_: object) -> None:
        self.number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.number and error is not None and not isinstance(error, Interrupted):  # whatever it was turned into
            raise Interrupted(f"stopped by {name_of(self.number)} {self.when}", 128 + self.number) from error


def stop_is_said(when: str) -> None:
    """From now on a signal that ends a run outside of its steps came then."""
    for number in SIGNALS:
        if isinstance(before := getattr(signal.getsignal(number), "__self__", None), BeforeFirstStep):
            before.when = when


class Interrupt:
    """First Ctrl-C or SIGTERM: finish the step, save, stop. Second Ctrl-C: KeyboardInterrupt at once."""

    def __init__(self, run: Stoppable):
        self.run = run
        self.previous: dict[int, Any] = {}

    def __enter__(self) -> None:
        stop_is_said("after its last step, which is saved as far as its settings ask for it")
        try:
            self.previous = {number: signal.signal(number, self.request_stop) for number in SIGNALS}
        except ValueError:  # not the main thread: the caller handles signals
            self.previous = {}

    def request_stop(self, number: int, *_: object) -> None:
        self.run.stop_requested = self.run.stop_requested or number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send several, then SIGKILL
        again = " (press Ctrl-C again to stop at once)" if number == signal.SIGINT else ""
        self.run.note(f"{name_of(number)}: stopping after this step{again}")

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def interrupted(number: int, step: int, total_steps: int, folder: object, command: str) -> Interrupted:
    """The end of a run that a signal stopped after `step`, which is saved in `folder`; `command` continues it."""
    return Interrupted(
        f"stopped by {name_of(number)} after step {step} of {total_steps}, which is saved in {folder}; {command} "
        "goes on from there",
        128 + number,
    )


def interrupted_by_loss(number: int, lost: BaseException, folder: object | None, command: str) -> Interrupted:
    """The end of a run that was to stop after its step, but lost a rank in it; `folder` is its newest checkpoint."""
    where = f"{folder} is the newest checkpoint; {command} goes on from there" if folder else "nothing was saved"
    return Interrupted(f"stopped by {name_of(number)}; its step was not finished: {lost}\n{where}", 128 + number)


def name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
