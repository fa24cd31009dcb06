"""One rank's part of a collective that must not leave the other ranks waiting when it fails, perhaps in a thread."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from verl.utils.errors import CheckpointError


class CollectiveSave:
    """`work` of this rank, and `finalize`, which rank 0 does once the work of all ranks is done."""

    FAILED, RUNNING, DONE = -1, 0, 1  # ordered: the least of all ranks is the state of the whole

    def __init__(self, work: Callable[[], None], finalize: Callable[[], None]):
        self.work, self.finalize = work, finalize
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, background: bool) -> None:
        """Do the work now, or in a thread. An error is kept for `raise_error`."""
        if not background:
            self.attempt(self.work)
            return
        self._thread = threading.Thread(target=self.attempt, args=(self.work,), name="save", daemon=True)
        self._thread.start()

    def attempt(self, task: Callable[[], None]) -> None:
        """`task()`, its error kept."""
        try:
            task()
        except Exception as error:
            self._error = error

    def state(self, wait: bool) -> int:
        """FAILED, RUNNING or DONE; never RUNNING after waiting."""
        if self._thread is not None:
            self._thread.join(None if wait else 0)
            if self._thread.is_alive():
                return self.RUNNING
        return self.DONE if self._error is None else self.FAILED

    def error_text(self) -> str:
        """What went wrong here; empty if nothing did."""
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def raise_error(self, reasons: list[str]) -> None:
        """Raise what went wrong here, or on another rank. `reasons`: every rank's."""
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        raise self._error or CheckpointError(f"rank {rank} failed with its part of this checkpoint: {reason}")


def drain(items: list[Any]) -> Iterator[Any]:
    """Each item once, without keeping it."""
    items.reverse()
    while items:
        yield items.pop()
