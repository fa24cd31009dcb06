"""Limits of an agent loop: a limit on its own time, and its ends as sentences."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from verl.agent.blocked_loop import watched
from verl.agent.policy import Policy
from verl.utils.errors import DataError, VerlError
from verl.utils.external_code import user_traceback

POLL_S = 1.0


async def bounded_run(run: Awaitable[Any], policy: Policy, timeout_s: float | None, what: str) -> Any:
    """The result of a loop that gets `timeout_s` for itself: time inside `generate`, and time during which the process
    is stopped, do not count. DataError for whatever else ends it. `what` is named where it blocks the event loop."""
    task = asyncio.ensure_future(_explained(run, policy))
    step = POLL_S if timeout_s is None else min(POLL_S, timeout_s / 4)
    used_s = 0.0
    try:
        with watched(task, what, timeout_s) as watch:
            while not task.done():
                generating = policy.generating
                await asyncio.wait({task}, timeout=step)
                watch.beat()
                used_s += 0.0 if generating or policy.generating else step  # poll intervals, not wall time
                if timeout_s is not None and used_s >= timeout_s and not task.done():
                    raise DataError(
                        f"it has taken {used_s:g} seconds besides generate(), more than actor_rollout_ref.rollout."
                        f"agent.timeout_s={timeout_s:g}; raise the key, or bound what the loop waits for"
                    )
        return task.result()
    finally:
        task.cancel()


async def _explained(run: Awaitable[Any], policy: Policy) -> Any:
    try:
        return await run
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise DataError(f"it raised CancelledError, though nobody cancelled it:\n{user_traceback(error)}") from error
    except VerlError:
        raise
    except (Exception, SystemExit) as error:
        if error is policy.failure:  # the engine's, not the loop's
            raise
        raise DataError(f"it failed:\n{user_traceback(error)}") from error
