"""Limits on calls of a reward function that asks a service: how many at once, and how many a minute."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verl.config import RewardConfig
from verl.rewards.bounded_calls import Calls, CallsCancelledError, Outcome, TooManyHangingCallsError
from verl.utils.errors import ConfigError

MINUTE_S = 60.0
LONGEST_KEPT_S = 60.0  # of turns by calls that were given up, while no other can run
_POLL_S = 1.0


@dataclass
class Turn:
    """One of the calls that may run at once."""

    still_runs: Future[None] | None = None  # of a call that was given up: the turn is kept until it is done


@dataclass(eq=False)
class _Waiter:
    loop: asyncio.AbstractEventLoop
    has_turn: asyncio.Future[None]


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
        self._size, self._free = max_concurrent, max_concurrent
        self._spacing_s = MINUTE_S / per_minute if per_minute else 0.0
        self._next_start = float("-inf")
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._waiting: deque[_Waiter] = deque()
        self._given: list[_Waiter] = []  # turns of which their event loops have not heard
        self._num_kept, self._kept_at = 0, 0.0  # turns of calls that were given up and still run, and since when

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Turn]:
        """The body is one call. TooManyHangingCallsError where calls that were given up keep all turns too long."""
        await self._enter()
        turn = Turn()
        try:
            await self._wait_for_start()
            yield turn
        finally:
            if turn.still_runs is None:
                self._leave()
            else:
                self._keep_until(turn.still_runs)

    async def _enter(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            loop = asyncio.get_running_loop()
            waiter = _Waiter(loop, loop.create_future())
            self._waiting.append(waiter)
        try:
            while not waiter.has_turn.done():
                await asyncio.wait({waiter.has_turn}, timeout=_POLL_S)
                with self._lock:
                    self._take_back_lost()
                    self._hand_out()
                    self._check_kept()
        except BaseException:  # it was cancelled, or waits for ever
            with self._lock:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                else:
                    if waiter in self._given:
                        self._given.remove(waiter)
                    self._give_back()
            raise

    def _leave(self) -> None:
        with self._lock:
            self._give_back()

    def _give_back(self) -> None:
        self._free += 1
        self._hand_out()

    def _hand_out(self) -> None:
        """Turns that are free go to who waits longest in an event loop that runs. The lock is held."""
        while self._free and (waiter := next((w for w in self._waiting if w.loop.is_running()), None)):
            self._waiting.remove(waiter)
            self._given.append(waiter)
            self._free -= 1
            with contextlib.suppress(RuntimeError):  # that loop was closed just now
                waiter.loop.call_soon_threadsafe(self._wake, waiter)

    def _wake(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._given:  # else its loop was stopped for a while, and another has the turn
                self._given.remove(waiter)
                waiter.has_turn.set_result(None)

    def _take_back_lost(self) -> None:
        """Turns that were given to event loops that were stopped before they heard of it."""
        for waiter in [waiter for waiter in self._given if not waiter.loop.is_running()]:
            self._given.remove(waiter)
            if not waiter.loop.is_closed():  # it may run again
                self._waiting.appendleft(waiter)
            self._free += 1

    def _keep_until(self, ended: Future[None]) -> None:
        with self._lock:
            self._num_kept, self._kept_at = self._num_kept + 1, self._clock()
        ended.add_done_callback(self._end_kept)

    def _end_kept(self, _: Future[None]) -> None:
        with self._lock:
            self._num_kept -= 1
            self._give_back()

    def _check_kept(self) -> None:
        if self._num_kept == self._size and self._clock() - self._kept_at > LONGEST_KEPT_S:
            raise TooManyHangingCallsError(
                f"all reward.max_concurrent={self._size} calls were given up at their limit and have not returned "
                f"{LONGEST_KEPT_S:.0f} s later"
            )

    async def _wait_for_start(self) -> None:
        with self._lock:
            start = max(self._clock(), self._next_start)
            self._next_start = start + self._spacing_s
        while (wait_s := start - self._clock()) > 0:
            await self._sleep(wait_s)


class LimitedCalls:
    """Calls of `calls`, each in its turn; waiting for it does not count for the time limit of the call."""

    def __init__(self, calls: Calls, limits: CallLimits):
        self._calls, self._limits = calls, limits

    async def run(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        return list(await asyncio.gather(*map(self._run_one, all_kwargs)))

    async def _run_one(self, kwargs: dict[str, Any]) -> Outcome:
        async with self._limits.turn() as turn:
            try:
                outcome = (await self._calls.run([kwargs]))[0]
            except CallsCancelledError as error:
                turn.still_runs = error.still_run
                raise
            turn.still_runs = outcome.still_runs
            return outcome


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
