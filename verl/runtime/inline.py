"""A group of one worker in this process, called directly."""

import inspect
from collections.abc import Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Any

from verl.runtime.event_loop import EventLoopThread
from verl.runtime.group import Layout, WorkerGroup


class InlineGroup(WorkerGroup):
    """A group of one rank. Errors are raised unchanged, with their own traceback.

    Plain methods run in the calling thread, coroutine methods in the thread of an event loop.
    """

    def __init__(self, worker: Any):
        self.worker, self.layout = worker, Layout()
        self._loop: EventLoopThread | None = None

    @property
    def local_worker(self) -> Any:
        return self.worker

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        [args] = arguments
        result = attrgetter(method)(self.worker)(*args)
        return [self.loop.run(result) if inspect.iscoroutine(result) else result]

    def post(self, rank: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future]:
        return [self._start(method, args) for args in arguments]

    def _start(self, method: str, args: tuple[Any, ...]) -> Future:
        future: Future = Future()
        try:
            result = attrgetter(method)(self.worker)(*args)
        except Exception as error:
            future.set_exception(error)
            return future
        if inspect.iscoroutine(result):
            return self.loop.start(result)
        future.set_result(result)
        return future

    @property
    def loop(self) -> EventLoopThread:
        """Started at the first coroutine."""
        if self._loop is None:
            self._loop = EventLoopThread("inline worker")
        return self._loop

    def close(self) -> None:
        """End the event loop, if one was started."""
        if self._loop is not None:
            self._loop.close()
