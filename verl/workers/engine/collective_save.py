"""One rank's part of a collective save, perhaps in a thread; its failure does not leave other ranks waiting."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

from verl.utils.errors import CheckpointError


class CollectiveSave:
    """`work` of this rank, and `finalize`, which rank 0 runs once the work of all ranks is done."""

    FAILED, RUNNING, DONE = -1, 0, 1  # ordered: the minimum over ranks is the state of the save

    def __init__(self, work: Callable[[], None], finalize: Callable[[], None]):
        self.work, self.finalize = work, finalize
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self, background: bool) -> None:
        """Run the work now, or in a thread. An error is stored for `raise_error`."""
        if not background:
            self.attempt(self.work)
            return
        self._thread = threading.Thread(target=self.attempt, args=(self.work,), name="save", daemon=True)
        self._thread.start()

    def attempt(self, task: Callable[[], None]) -> None:
        """Run `task()` and store its error."""
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
        """The error of this rank; empty if there is none."""
        return "" if self._error is None else f"{type(self._error).__name__}: {self._error}"

    def raise_error(self, reasons: list[str]) -> None:
        """Raise the error of this rank, or else of another one. `reasons`: every rank's `error_text`."""
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        raise self._error or CheckpointError(f"rank {rank} failed with its part of this checkpoint: {reason}")


def drain(items: list[Any]) -> Iterator[Any]:
    """Yield each item once, and drop it from `items`."""
    items.reverse()
    while items:
        yield items.pop()
