"""Places for workers that are processes, and the one pool of a kind that a process has."""

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

W = TypeVar("W")


class Closable(Protocol):
    def close(self) -> None: ...


P = TypeVar("P", bound=Closable)


class WorkerSlots(Generic[W]):
    """Free places, each with a worker or None where one is still to start. Any number of threads may take them."""

    def __init__(self, size: int, first: W | None = None):
        # The worker that was put back last is taken first: a pool that is seldom asked starts one.
        self._free: queue.LifoQueue[W | None] = queue.LifoQueue()
        for worker in (*[None] * (size - 1), first):
            self._free.put(worker)

    def take(self) -> W | None:
        """A place, for which it waits; `put_back` must follow."""
        return self._free.get()

    def put_back(self, worker: W | None) -> None:
        self._free.put(worker)

    def clear(self) -> list[W]:
        """The workers of the places that are free; their places stay."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._free.get_nowait())
        for _ in found:
            self._free.put(None)
        return [worker for worker in found if worker is not None]


class OfProcess(Generic[P]):
    """The pool that all callers of this process share, made at the first call and closed at its end.

    A forked process gets another: it must not talk to the workers of its parent.
    """

    def __init__(self, make: Callable[[], P]):
        self._make = make
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._pool: P | None = None
        self._lock = threading.RLock()  # a finalizer may ask for it at any time

    def __call__(self) -> P:
        with self._lock:
            if self._pool is None:
                self._pool = self._make()
                atexit.register(self._pool.close)
            return self._pool
