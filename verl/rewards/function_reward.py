"""A reward from a function `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.rewards.base import NoScorerError, RewardInput, Score
from verl.rewards.batch_calls import BatchCalls
from verl.rewards.call_limits import CallLimits
from verl.rewards.call_retries import RetriedCalls
from verl.rewards.calls import (
    GENERATORS,
    BlockedLoopError,
    Calls,
    Executor,
    Outcome,
    ProcessLostError,
    RemoteCallError,
    RewardTimeoutError,
)
from verl.rewards.error_budget import ErrorBudget
from verl.rewards.score_reading import read_score, safe_text
from verl.utils.errors import ConfigError, RewardError
from verl.utils.external_code import user_traceback

logger = logging.getLogger(__name__)

ON_ERROR_CHOICES = ("stop", "count")
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
    processes: str = ""  # num_threads processes with one call at a time each: "here", or "anywhere" where there is Ray
    batched: bool = False  # answers that come together, those to one prompt, are scored in one call
    weights: Mapping[str, float] | None = None  # of the parts that the function returns


DEFAULT_RULES = CallRules()


def row_arguments(item: RewardInput) -> dict[str, Any]:
    """The arguments of a reward function for one answer, by name."""
    told = {"rollout_reward_scores": item.extra_info.get("reward_scores", {})}
    return {
        "data_source": item.data_source,
        "solution_str": item.solution_str,
        "ground_truth": item.ground_truth,
        "extra_info": {**told, **item.extra_info, "num_turns": item.num_turns},
    }


class FunctionReward:
    """Scores each answer by one call of a function, which `executor` makes; `arguments` are those of an answer.

    A call that raises, returns no finite number or takes too long stops the run or becomes a `Score` with an error, as
    `rules` say; it never gets the value 0.
    """

    def __init__(
        self,
        executor: Executor,
        name: str,
        rules: CallRules = DEFAULT_RULES,
        arguments: Callable[[RewardInput], dict[str, Any]] = row_arguments,
    ):
        if rules.on_error not in ON_ERROR_CHOICES:
            raise ConfigError(f"reward.on_error={rules.on_error!r}; allowed: {', '.join(ON_ERROR_CHOICES)}")
        if rules.timeout_s is not None and rules.timeout_s <= 0:
            raise ConfigError(f"reward.timeout_s={rules.timeout_s}; it must be positive, or null for no limit")
        self.name, self.executor, self._arguments = name, executor, arguments
        self._rules, self._budget = rules, ErrorBudget(rules.max_errors)
        calls: Calls = RetriedCalls(executor, rules.retries) if rules.retries else executor
        self._calls = BatchCalls(calls) if rules.batched else calls
        self._reported: set[str] = set()

    @property
    def is_async(self) -> bool:
        """Whether the function is async, and so likely asks a service."""
        return self.executor.is_async

    async def exchange_generators(self, states: str | None) -> str | None:
        """The states of the random generators that calls draw from, which `states` replace; None where it has many."""
        if self._rules.processes:
            return None
        outcome = (await self.executor.call([{GENERATORS: states}]))[0]
        return outcome.result if outcome.error is None else None

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        outcomes = await self._calls.call([*map(self._arguments, inputs)])
        return [self._to_score(item, outcome) for item, outcome in zip(inputs, outcomes, strict=True)]

    def _to_score(self, item: RewardInput, outcome: Outcome) -> Score:
        if outcome.earlier:
            last = self._to_score(item, replace(outcome, earlier=()))
            lost = last.processes_lost + sum(isinstance(error, ProcessLostError) for error in outcome.earlier)
            return replace(last, retries=len(outcome.earlier), processes_lost=lost)
        if isinstance(outcome.error, BlockedLoopError):
            raise RewardError(f"reward function {self.name}: {outcome.error}")
        if outcome.error is not None:
            score = self._raise_or_leave_out(item, outcome.error)
            return replace(score, processes_lost=int(isinstance(outcome.error, ProcessLostError)))
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
                "them (docs/rewards/own_reward.md)"
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
