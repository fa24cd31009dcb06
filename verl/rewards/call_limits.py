"""Limits on calls of a reward function that asks a service: how many at once, and how many a minute."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from verl.config import RewardConfig
from verl.utils.errors import ConfigError

MINUTE_S = 60.0


class CallLimits:
    """At most `max_concurrent` calls run at once, and at most `per_minute` (None: any number) start within any minute.

    Calls start in the order in which they asked, in one event loop. The minute is kept by a spacing: it never lets a
    burst through that a service would refuse.
    """

    def __init__(
        self,
        max_concurrent: int,
        per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ):
        self._turns, self._spacing_s = asyncio.Semaphore(max_concurrent), MINUTE_S / per_minute if per_minute else 0.0
        self._next_start = float("-inf")
        self._clock, self._sleep = clock, sleep

    async def enter(self) -> None:
        """Wait until a call may start; `leave` must follow when it has ended."""
        await self._turns.acquire()
        start = max(self._clock(), self._next_start)
        self._next_start = start + self._spacing_s
        try:
            while (wait_s := start - self._clock()) > 0:
                await self._sleep(wait_s)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        self._turns.release()


_of_process: dict[tuple[int, int | None], CallLimits] = {}


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
    key = (config.max_concurrent, per_minute)
    return _of_process.setdefault(key, CallLimits(*key))
