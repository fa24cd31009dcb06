"""Turns of sampling and scoring, where the rollout and a reward model use the same devices."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

SAMPLE, SCORE = "sample", "score"


class DeviceTurns:
    """Many may take the turn that it is. The other begins when nobody takes this one and somebody waits for it.

    `begin[turn]` is awaited before the first of a turn goes on, such as to let one model sleep and the other wake.
    """

    def __init__(self, begin: dict[str, Callable[[], Awaitable[None]]]):
        self.begin, self.now = begin, SAMPLE
        self._running = 0
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []
        self._change: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def take(self, turn: str) -> AsyncIterator[None]:
        """Inside the block it is `turn`."""
        if turn != self.now or self._change is not None:
            granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, granted))
            self._change_if_idle()
            try:
                await granted
            except asyncio.CancelledError:
                if granted.done() and not granted.cancelled():
                    self._leave()
                raise
        else:
            self._running += 1
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        self._running -= 1
        self._change_if_idle()

    def _change_if_idle(self) -> None:
        waiting = any(not granted.done() for _, granted in self._waiting)
        if not self._running and waiting and self._change is None:
            self._change = asyncio.create_task(self._change_turn())

    async def _change_turn(self) -> None:
        """Begin the other turn and let go on, together, who waits for it."""
        self.now = SCORE if self.now == SAMPLE else SAMPLE
        error: Exception | None = None
        try:
            await self.begin[self.now]()
        except Exception as failure:
            error = failure
        self._change = None
        due = [granted for turn, granted in self._waiting if not granted.done() and (turn == self.now or error)]
        self._waiting = [(turn, granted) for turn, granted in self._waiting if turn != self.now and not granted.done()]
        for granted in due:
            if error is not None:
                granted.set_exception(error)
            else:
                self._running += 1
                granted.set_result(None)
        self._change_if_idle()
