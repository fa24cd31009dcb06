"""Limits of a user's agent loop: a limit on its own time, its ends as sentences, and what it may return."""

import asyncio
import math
from collections.abc import Awaitable, Collection, Mapping
from typing import Any

from verl.agent.blocked_loop import watched
from verl.agent.llm_server import LLMServerClient
from verl.agent.loop import AgentLoopOutput
from verl.utils.errors import DataError, VerlError
from verl.utils.external_code import user_traceback

POLL_S = 1.0
MAX_LOGPROB = 0.01  # a log-prob is at most 0, and rounding moves it a little


async def bounded_run(run: Awaitable[Any], server: LLMServerClient, timeout_s: float | None, what: str) -> Any:
    """The result of a loop that gets `timeout_s` for itself: time inside `generate`, and time during which the process
    is stopped, do not count. DataError for whatever else ends it. `what` is named where it blocks the event loop."""
    task = asyncio.ensure_future(_explained(run, server))
    step = POLL_S if timeout_s is None else min(POLL_S, timeout_s / 4)
    used_s = 0.0
    try:
        with watched(task, what, timeout_s) as watch:
            while not task.done():
                generating = server.generating
                await asyncio.wait({task}, timeout=step)
                watch.beat()
                used_s += 0.0 if generating or server.generating else step  # poll intervals, not wall time
                if timeout_s is not None and used_s >= timeout_s and not task.done():
                    raise DataError(
                        f"it has taken {used_s:g} seconds besides generate(), more than actor_rollout_ref.rollout."
                        f"agent.timeout_s={timeout_s:g}; raise the key, or bound what the loop waits for"
                    )
        return task.result()
    finally:
        task.cancel()


async def _explained(run: Awaitable[Any], server: LLMServerClient) -> Any:
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
        if error is server.failure:  # the engine's, not the loop's
            raise
        raise DataError(f"it failed:\n{user_traceback(error)}") from error


def checked_outputs(result: Any, server: LLMServerClient) -> list[AgentLoopOutput]:
    """The outputs of a loop, as a list; DataError names the one that cannot be trained on."""
    outputs = result if isinstance(result, list) else [result]
    if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):
        raise DataError(f"it returned {result!r:.200}, not AgentLoopOutput")
    for output in outputs:
        _check_and_normalize(output, server)
    return outputs


def _check_and_normalize(output: AgentLoopOutput, server: LLMServerClient) -> None:
    """DataError for what cannot be trained on; the columns of `output` become lists of Python numbers in place."""
    output.prompt_ids = server.check_tokens(output.prompt_ids, "prompt_ids")
    if not output.prompt_ids:
        raise DataError("prompt_ids is empty; a conversation starts with at least one token that was not sampled")
    output.response_ids = server.check_tokens(output.response_ids, "response_ids")
    size, limit = len(output.response_ids), server.max_sequence_length
    output.response_mask = [int(v) for v in _response_values(output.response_mask, "response_mask", size, (0, 1))]
    if output.response_logprobs is not None and len(output.response_logprobs):
        values = _response_values(output.response_logprobs, "response_logprobs", size)
        output.response_logprobs = [_logprob(v, i) for i, v in enumerate(values)]
    if len(output.prompt_ids) + size > limit:
        raise DataError(
            f"prompt_ids and response_ids have {len(output.prompt_ids)} + {size} tokens, more than the {limit} of "
            "rollout.max_model_len (or prompt_length + response_length); end the loop there, or raise the key"
        )
    if output.reward_score is not None and not _is_finite(output.reward_score):
        raise DataError(f"reward_score={output.reward_score!r:.80} must be a finite number, or None for the reward")
    for name in ("extra_fields", "metrics"):
        value = getattr(output, name)
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            continue
        if name == "extra_fields" or isinstance(value, dict) or not hasattr(value, "__dataclass_fields__"):
            raise DataError(f"{name}={value!r:.80} must be a dictionary with names as keys")
    if not isinstance(output.extra_fields.get("reward_extra_info", {}), Mapping):
        raise DataError("extra_fields['reward_extra_info'] must be a dictionary of columns for the reward's log")
    rewards = output.extra_fields.get("tool_rewards")
    if isinstance(rewards, str) or not hasattr([] if rewards is None else rewards, "__len__"):
        raise DataError(f"extra_fields['tool_rewards']={rewards!r:.80} must be a list with one number per tool call")
    if isinstance(output.num_turns, bool) or not isinstance(output.num_turns, int) or output.num_turns < 0:
        raise DataError(f"num_turns={output.num_turns!r:.80} must be a whole number from 0")


def _response_values(values: Any, name: str, size: int, allowed: Collection[Any] = ()) -> list[Any]:
    """`values` as a list of `size` items, each among `allowed` unless that is empty."""
    try:
        items = values.tolist() if hasattr(values, "tolist") else list(values)
    except TypeError:
        raise DataError(f"{name} is {type(values).__name__}, not a list") from None
    if len(items) != size:
        raise DataError(f"there are {size} response_ids, but {len(items)} values in {name}; they must agree")
    for position, item in enumerate(items):
        if allowed and (isinstance(item, list | str | None) or item not in allowed):
            raise DataError(
                f"{name}[{position}]={item!r:.80}; allowed: 1 for tokens that the policy sampled, 0 for all others"
            )
    return items


def _logprob(value: Any, position: int) -> float:
    if not _is_finite(value) or value > MAX_LOGPROB:
        raise DataError(
            f"response_logprobs[{position}]={value!r:.80}; a log-prob is a finite number of at most 0: give those of "
            "generate(), 0 for tokens that were not sampled, or None for all"
        )
    return float(value)


def _is_finite(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False
