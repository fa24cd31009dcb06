"""A reward from a function `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`."""

import copy
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl.rewards.base import NoScorerError, RewardInput, Score
from verl.rewards.bounded_calls import CallPool, Outcome, RewardTimeoutError, TooManyHangingCallsError, is_async
from verl.rewards.process_state import ProcessGuard
from verl.rewards.score_reading import is_equal, read_score, safe_text
from verl.utils.errors import ConfigError, RewardError
from verl.utils.external_code import user_traceback

logger = logging.getLogger(__name__)

ON_ERROR_CHOICES = ("stop", "count")
UNCHANGEABLE = frozenset({str, int, float, bool, bytes, type(None)})  # need no copy
ANSWER_LENGTH = 200  # characters of an answer in a message


class FunctionReward:
    """Scores each answer by one call of a function: sync functions in threads, async ones in their own event loop.

    A call that raises, returns no finite number or takes longer than `timeout_s` stops the run (`on_error="stop"`) or
    becomes a `Score` with an error (`"count"`); it never gets the value 0. Every call gets its own copy of the row, and
    what it changes in the process is undone and named once.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        kwargs: Mapping[str, Any] | None = None,
        on_error: str = "stop",
        num_threads: int = 8,
        timeout_s: float | None = 300.0,
        weights: Mapping[str, float] | None = None,
    ):
        if on_error not in ON_ERROR_CHOICES:
            raise ConfigError(f"reward.on_error={on_error!r}; allowed: {', '.join(ON_ERROR_CHOICES)}")
        if timeout_s is not None and timeout_s <= 0:
            raise ConfigError(f"reward.timeout_s={timeout_s}; it must be positive, or null for no limit")
        self.name = name
        self._kwargs, self._weights = dict(kwargs or {}), weights
        self._on_error = on_error
        self._guard = ProcessGuard(f"reward function {name}")
        guarded = function if is_async(function) else lambda **kwargs: self._guard.call(function, kwargs)
        self._call_pool = CallPool(guarded, num_threads, timeout_s)
        self._reported: set[str] = set()
        check_signature(function, name, self._kwargs)

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        all_kwargs = [self._call_kwargs(item) for item in inputs]
        try:
            with self._guard.batch():
                outcomes = await self._call_pool.run(all_kwargs)
        except TooManyHangingCallsError as error:
            raise RewardError(f"reward function {self.name}: {error}") from error
        for item, kwargs in zip(inputs, all_kwargs, strict=True):
            self._name_changed_row(item, kwargs)
        return [self._to_score(item, outcome) for item, outcome in zip(inputs, outcomes, strict=True)]

    def _call_kwargs(self, item: RewardInput) -> dict[str, Any]:
        return {
            "data_source": item.data_source,
            "solution_str": item.solution_str,
            "ground_truth": _own_copy(item.ground_truth),
            "extra_info": {"rollout_reward_scores": {}, **_own_copy(item.extra_info), "num_turns": item.num_turns},
            **self._kwargs,
        }

    def _name_changed_row(self, item: RewardInput, kwargs: dict[str, Any]) -> None:
        given = {"ground_truth": item.ground_truth, "extra_info": item.extra_info}
        changed = [n for n, v in given.items() if n not in self._kwargs and not is_equal(v, kwargs[n])]
        self._guard.report([f"{name} (of {item.where or 'a row'})" for name in changed])

    def _to_score(self, item: RewardInput, outcome: Outcome) -> Score:
        if outcome.error is not None:
            return self._raise_or_leave_out(item, outcome.error)
        try:
            return read_score(outcome.result, self._weights)
        except ValueError as error:  # our own sentence about what it returned
            return self._raise_or_leave_out(item, error.with_traceback(None))
        except Exception as error:  # what it returned may be of the user's own types
            return self._raise_or_leave_out(item, error)

    def _raise_or_leave_out(self, item: RewardInput, error: BaseException) -> Score:
        """A Score without a value, with the logged error (`on_error="count"`); RewardError with "stop"."""
        summary = f"{type(error).__name__}: {safe_text(error)}"
        location = f"{item.where or 'a row'} (data_source {item.data_source!r})"
        # A traceback of our own check or timeout says nothing about the user's function.
        own = isinstance(error, RewardTimeoutError | NoScorerError) or error.__traceback__ is None
        details = f" {summary}" if own else f"\n{user_traceback(error)}"
        answer = item.solution_str
        shown = repr(answer[:ANSWER_LENGTH]) + (f"... ({len(answer):,} characters)" * (len(answer) > ANSWER_LENGTH))
        message = f"reward function {self.name} failed on {location}:{details}\nThe answer was {shown}"
        if self._on_error == "stop":
            raise RewardError(
                f"{message}\nRepair the function, or set reward.on_error=count to leave such answers out and count "
                "them (docs/own_reward.md)"
            ) from error
        if summary not in self._reported and len(self._reported) < 20:
            self._reported.add(summary)
            logger.warning("%s\nThe answer is left out and counted in reward/errors", message)
        return Score(value=None, error=f"{self.name}: {summary}")


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


def check_signature(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any]) -> None:
    """ConfigError when the function cannot take the keyword arguments it will be called with."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in callables have none
        return
    keywords = dict.fromkeys(["data_source", "solution_str", "ground_truth", "extra_info", *kwargs])
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(
            f"reward function {name}{signature} cannot be called with the keywords {', '.join(keywords)}: {error}. "
            "Define it as compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"
        ) from error
