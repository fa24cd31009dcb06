"""Further attempts of reward calls that failed."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from verl.rewards.base import NoScorerError
from verl.rewards.calls import BlockedLoopError, Calls, Outcome, RemoteCallError
from verl.utils.errors import VerlError

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0


def may_succeed(outcome: Outcome) -> bool:
    """Whether the call failed in a way that another attempt may repair."""
    error = outcome.error
    if isinstance(error, RemoteCallError):
        return not error.is_final
    return isinstance(error, Exception) and not isinstance(error, NoScorerError | VerlError | BlockedLoopError)


class RetriedCalls:
    """Calls of `calls`, of which one that raised or took too long is made up to `retries` times more.

    It waits 1, 2, 4, ... s before that, at most 60, times a factor in [0.5, 1) from a seeded generator. What another
    attempt cannot repair is not tried again: a data source without a scorer, and a result of a wrong type.
    `is_retriable` tells of other calls what it can repair.
    """

    def __init__(
        self,
        calls: Calls,
        retries: int,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
        is_retriable: Callable[[Outcome], bool] = may_succeed,
    ):
        self._calls, self._retries, self._sleep = calls, retries, sleep
        self._is_retriable = is_retriable
        self._random = random.Random(0)

    async def call(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        outcomes = await self._calls.call(all_kwargs)
        if not any(map(self._is_retriable, outcomes)):
            return outcomes
        return list(await asyncio.gather(*map(self._again, all_kwargs, outcomes)))

    async def _again(self, kwargs: dict[str, Any], outcome: Outcome) -> Outcome:
        for attempt in range(self._retries):
            if not self._is_retriable(outcome) or outcome.error is None:
                break
            wait_s = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
            await self._sleep(wait_s * self._random.uniform(0.5, 1.0))
            earlier = (*outcome.earlier, outcome.error)
            outcome = replace((await self._calls.call([kwargs]))[0], earlier=earlier)
        return outcome
