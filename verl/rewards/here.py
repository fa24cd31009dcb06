"""Calls of a function object in this process: no limit of time, and what they change stays changed."""

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.rewards.calls import GENERATORS, Outcome, check_signature, is_async
from verl.rewards.scoring_child import exchange_generators


class Here:
    """Calls of `function`, which gets `kwargs` with every call: plain ones in `num_threads` threads, async ones in the
    event loop of the caller. Every call gets its own copy of the row."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str = "compute_score",
        kwargs: Mapping[str, Any] | None = None,
        num_threads: int = 1,
        is_batched: bool = False,
    ):
        self._function, self._kwargs, self.is_async = function, dict(kwargs or {}), is_async(function)
        self._threads = ThreadPoolExecutor(num_threads, "reward")
        check_signature(function, name, self._kwargs, is_batched)

    async def call(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        if GENERATORS in (rows[0] if rows else {}):
            return [Outcome(exchange_generators(row[GENERATORS])) for row in rows]
        if self.is_async:
            return list(await asyncio.gather(*map(self._call_async, rows)))
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(self._threads, self._call, row) for row in rows)))

    def _call(self, row: dict[str, Any]) -> Outcome:
        try:
            return Outcome(self._function(**{**_own_copy(row), **self._kwargs}))
        except BaseException as error:  # also SystemExit: user code must not end a thread silently
            return Outcome(error=error)

    async def _call_async(self, row: dict[str, Any]) -> Outcome:
        try:
            return Outcome(await self._function(**{**_own_copy(row), **self._kwargs}))
        except BaseException as error:  # also CancelledError, if the function itself raises it
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return Outcome(error=error)


def _own_copy(row: dict[str, Any]) -> dict[str, Any]:
    try:
        return copy.deepcopy(row)
    except Exception:  # an object that an agent loop added
        return dict(row)
