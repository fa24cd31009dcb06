"""A reward from a function `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.rewards.base import NoScorerError, RewardInput, Score
from verl.rewards.batch_calls import PLURALS, BatchCalls
from verl.rewards.bounded_calls import (
    ARGUMENTS,
    CallPool,
    Calls,
    Outcome,
    ProcessLostError,
    RemoteCallError,
    RewardTimeoutError,
    TooManyHangingCallsError,
    check_signature,
    is_async,
)
from verl.rewards.call_limits import CallLimits, LimitedCalls
from verl.rewards.call_retries import RetriedCalls
from verl.rewards.error_budget import ErrorBudget
from verl.rewards.process_state import ProcessGuard
from verl.rewards.score_reading import is_equal, read_score, safe_text
from verl.utils.errors import ConfigError, RewardError
from verl.utils.external_code import user_traceback

logger = logging.getLogger(__name__)

ON_ERROR_CHOICES = ("stop", "count")
UNCHANGEABLE = frozenset({str, int, float, bool, bytes, type(None)})  # need no copy
ANSWER_LENGTH = 200  # characters of an answer in a message


@dataclass(frozen=True)
class CallRules:
    """How a function is called, and what becomes of its errors."""

    on_error: str = "stop"  # or "count": the answer gets a Score with an error
    max_errors: int | None = None  # "count": that many; None: any number
    num_threads: int = 8
    timeout_s: float | None = 300.0  # of one call; None: the function keeps its own limit, or there is none
    retries: int = 0  # further attempts of a call that raised or took too long
    limits: CallLimits | None = None  # say when a call may start
    batched: bool = False  # answers that come together, those to one prompt, are scored in one call
    weights: Mapping[str, float] | None = None  # of the parts that the function returns


DEFAULT_RULES = CallRules()


class FunctionReward:
    """Scores each answer by one call of a function: sync functions in threads, async ones in their own event loop.

    A call that raises, returns no finite number or takes too long stops the run or becomes a `Score` with an error, as
    `rules` say; it never gets the value 0. Every call gets its own copy of the row, and what it changes in the process
    is undone and named once. `arguments` makes those of a call from an answer, where they are others than the row's.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        kwargs: Mapping[str, Any] | None = None,
        rules: CallRules = DEFAULT_RULES,
        arguments: Callable[[RewardInput], dict[str, Any]] | None = None,
    ):
        if rules.on_error not in ON_ERROR_CHOICES:
            raise ConfigError(f"reward.on_error={rules.on_error!r}; allowed: {', '.join(ON_ERROR_CHOICES)}")
        if rules.timeout_s is not None and rules.timeout_s <= 0:
            raise ConfigError(f"reward.timeout_s={rules.timeout_s}; it must be positive, or null for no limit")
        self.name = name
        self._kwargs, self._rules, self._budget = dict(kwargs or {}), rules, ErrorBudget(rules.max_errors)
        self._own_arguments = arguments
        self._guard = ProcessGuard(f"reward function {name}")
        guard = self._guard  # the threads must not hold this object, with which they end
        guarded = function if is_async(function) else lambda **kwargs: guard.call(function, kwargs)
        calls: Calls = CallPool(guarded, rules.num_threads, rules.timeout_s)
        calls = calls if rules.limits is None else LimitedCalls(calls, rules.limits)
        calls = RetriedCalls(calls, rules.retries) if rules.retries else calls
        self._calls = BatchCalls(calls, self._kwargs) if rules.batched else calls
        self._reported: set[str] = set()
        if arguments is None:
            check_signature(function, name, self._kwargs, tuple(PLURALS.values()) if rules.batched else ARGUMENTS)

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        all_kwargs = [*map(self._own_arguments or self._row_arguments, inputs)]
        try:
            with self._guard.batch():
                outcomes = await self._calls.run(all_kwargs)
        except TooManyHangingCallsError as error:
            raise RewardError(f"reward function {self.name}: {error}") from error
        for item, kwargs in zip(inputs, all_kwargs, strict=True):
            self._name_changed_row(item, kwargs)
        return [
            _with_attempts(self._to_score(item, outcome), outcome)
            for item, outcome in zip(inputs, outcomes, strict=True)
        ]

    def _row_arguments(self, item: RewardInput) -> dict[str, Any]:
        return {
            "data_source": item.data_source,
            "solution_str": item.solution_str,
            "ground_truth": _own_copy(item.ground_truth),
            "extra_info": {
                "rollout_reward_scores": _own_copy(item.extra_info.get("reward_scores", {})),
                **_own_copy(item.extra_info),
                "num_turns": item.num_turns,
            },
            **self._kwargs,
        }

    def _name_changed_row(self, item: RewardInput, kwargs: dict[str, Any]) -> None:
        given = {"ground_truth": item.ground_truth, "extra_info": item.extra_info}
        changed = [n for n, v in given.items() if n in kwargs.keys() - self._kwargs and not is_equal(v, kwargs[n])]
        self._guard.report([f"{name} (of {item.where or 'a row'})" for name in changed])

    def _to_score(self, item: RewardInput, outcome: Outcome) -> Score:
        if outcome.error is not None:
            return self._raise_or_leave_out(item, outcome.error)
        try:
            return read_score(outcome.result, self._rules.weights)
        except ValueError as error:  # our own sentence about what it returned
            return self._raise_or_leave_out(item, error.with_traceback(None))
        except Exception as error:  # what it returned may be of the user's own types
            return self._raise_or_leave_out(item, error)

    def _raise_or_leave_out(self, item: RewardInput, error: BaseException) -> Score:
        """A Score without a value, with the logged error (`on_error="count"`); RewardError with "stop"."""
        summary, traceback = _described(error)
        location = f"{item.where or 'a row'} (data_source {item.data_source!r})"
        details = f"\n{traceback}" if traceback else f" {summary}"
        answer = item.solution_str
        shown = repr(answer[:ANSWER_LENGTH]) + (f"... ({len(answer):,} characters)" * (len(answer) > ANSWER_LENGTH))
        message = f"reward function {self.name} failed on {location}:{details}\nThe answer was {shown}"
        if self._rules.on_error == "stop":
            raise RewardError(
                f"{message}\nRepair the function, or set reward.on_error=count to leave such answers out and count "
                "them (docs/own_reward.md)"
            ) from error
        self._budget.spend(message)
        if summary not in self._reported and len(self._reported) < 20:
            self._reported.add(summary)
            logger.warning("%s\nThe answer is left out and counted in reward/errors", message)
        return Score(value=None, error=f"{self.name}: {summary}")


def _described(error: BaseException) -> tuple[str, str]:
    """One line, and the traceback; "" for our own check, timeout or process: it says nothing about the function."""
    if isinstance(error, RemoteCallError):
        return error.summary, error.traceback
    own = isinstance(error, RewardTimeoutError | NoScorerError | ProcessLostError) or error.__traceback__ is None
    return f"{type(error).__name__}: {safe_text(error)}", "" if own else user_traceback(error)


def _with_attempts(score: Score, outcome: Outcome) -> Score:
    errors = (*outcome.earlier, outcome.error)
    lost = sum(isinstance(error, ProcessLostError) for error in errors)
    return replace(score, retries=len(outcome.earlier), processes_lost=lost) if outcome.earlier or lost else score


def _own_copy(value: Any) -> Any:
    """A deep copy, so that a call cannot change the data set's row; the value itself where it cannot be copied."""
    if type(value) in UNCHANGEABLE:
        return value
    if type(value) is dict and all(type(item) in UNCHANGEABLE for item in value.values()):
        return dict(value)
    try:
        return copy.deepcopy(value)
    except Exception:  # an object that an agent loop added
        return copy.copy(value) if isinstance(value, dict | list) else value
