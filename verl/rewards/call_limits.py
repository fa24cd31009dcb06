"""Limits on calls of a reward function that asks a service: how many at once, and how many a minute."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from verl.config import RewardConfig
from verl.rewards.bounded_calls import Calls, Outcome
from verl.utils.errors import ConfigError

MINUTE_S = 60.0


class CallLimits:
    """At most `max_concurrent` calls run at once, and at most `per_minute` (None: any number) start within any minute.

    Calls start in the order in which they asked, from any event loop and thread. The minute is kept by a token bucket
    that holds one call: it never lets a burst through that a service would refuse.
    """

    def __init__(
        self,
        max_concurrent: int,
        per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ):
        self._free, self._spacing_s = max_concurrent, MINUTE_S / per_minute if per_minute else 0.0
        self._next_start = float("-inf")
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The body is one call."""
        await self._enter()
        try:
            await self._wait_for_start()
            yield
        finally:
            self._leave()

    async def _enter(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            loop = asyncio.get_running_loop()
            waiter = (loop, loop.create_future())
            self._waiting.append(waiter)
        try:
            await waiter[1]
        except asyncio.CancelledError:
            with self._lock:
                has_turn = waiter not in self._waiting
                if not has_turn:
                    self._waiting.remove(waiter)
            if has_turn:
                self._leave()
            raise

    def _leave(self) -> None:
        with self._lock:
            while self._waiting:
                loop, future = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # that loop was closed
                    loop.call_soon_threadsafe(_wake, future)
                    return
            self._free += 1

    async def _wait_for_start(self) -> None:
        with self._lock:
            start = max(self._clock(), self._next_start)
            self._next_start = start + self._spacing_s
        while (wait_s := start - self._clock()) > 0:
            await self._sleep(wait_s)


def _wake(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)


class LimitedCalls:
    """Calls of `calls`, each in its turn; waiting for it does not count for the time limit of the call."""

    def __init__(self, calls: Calls, limits: CallLimits):
        self._calls, self._limits = calls, limits

    async def run(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        return list(await asyncio.gather(*map(self._run_one, all_kwargs)))

    async def _run_one(self, kwargs: dict[str, Any]) -> Outcome:
        async with self._limits.turn():
            return (await self._calls.run([kwargs]))[0]


_of_process: dict[tuple[int, int | None], CallLimits] = {}
_of_process_lock = threading.Lock()


def limits_of_process(config: RewardConfig) -> CallLimits:
    """The limits that `config` names, one object for all rewards of this process that name the same."""
    per_minute, each = config.max_rpm, config.estimated_tokens_per_request
    if config.max_tpm is not None:
        if config.max_tpm < each:
            raise ConfigError(
                f"reward.max_tpm={config.max_tpm} is below reward.estimated_tokens_per_request={each}: no call could "
                "ever start; lower the estimate to what one call takes, or raise the limit"
            )
        per_minute = min(per_minute or config.max_tpm, config.max_tpm // each)
    with _of_process_lock:
        key = (config.max_concurrent, per_minute)
        return _of_process.setdefault(key, CallLimits(*key))
