"""An event loop that the driver runs while it waits for a result, and a thread of its own runs otherwise."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class DriverLoop:
    """One event loop, run by one thread at a time. Only the thread that made it calls its methods.

    `run` drives the loop in the calling thread, so that a coroutine that computes uses that thread's OpenMP team and
    a signal reaches it there. What `start` began goes on in a thread of its own whenever the caller does not wait.
    """

    def __init__(self, name: str):
        self.name = name
        self._runner = asyncio.Runner()
        self._started: set[Future[Any]] = set()  # of `start`, not done
        self._thread: threading.Thread | None = None  # at the first `start`
        self._turns: SimpleQueue[bool] = SimpleQueue()  # True: run the loop; False: end
        self._returned = threading.Event()  # set by the thread when its turn has ended
        self._error: BaseException | None = None
        self._is_away = False  # whether it is the thread's turn

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of `coroutine`; an exception has its own traceback. After one, nothing goes on by itself."""
        try:
            self._take_back()
        except BaseException:
            coroutine.close()  # it never began
            raise
        result = self._runner.run(coroutine)
        if self._started:
            self._hand_over()
        return result

    def start(self, coroutine: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Begin `coroutine`, which goes on while the caller does something else; cancelling the future cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._runner.get_loop())
        self._started.add(future)
        future.add_done_callback(self._started.discard)
        if not self._is_away:
            self._hand_over()
        return future

    def close(self) -> None:
        """Cancel what still runs and wait until it has ended; then end the thread and the loop."""
        try:
            self._take_back()
        finally:
            if self._thread is not None:
                self._turns.put(False)
                self._thread.join()
            self._runner.close()

    def _hand_over(self) -> None:
        """Let the thread run the loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._take_turns, name=self.name, daemon=True)
            self._thread.start()
        self._is_away = True
        self._returned.clear()
        self._turns.put(True)

    def _take_back(self) -> None:
        """Wait until the thread has left the loop; raises what ended its turn."""
        if self._is_away:
            loop = self._runner.get_loop()
            loop.call_soon_threadsafe(loop.stop)
            self._returned.wait()
            self._is_away = False
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _take_turns(self) -> None:
        while self._turns.get():
            try:
                self._runner.get_loop().run_forever()
            except BaseException as error:  # KeyboardInterrupt or SystemExit of a coroutine
                self._error = error
            self._returned.set()
