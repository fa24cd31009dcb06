"""The score of a reward model as a reward: alone, or as the part `rm` beside the parts of a function."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from verl.config.reward import RM
from verl.rewards.base import Reward, RewardInput, Score
from verl.rewards.call_retries import RetriedCalls
from verl.rewards.calls import Outcome
from verl.rewards.conversation_tokens import ConversationTokens
from verl.rewards.error_budget import ErrorBudget
from verl.rewards.function_reward import CallRules
from verl.utils.errors import RewardError, VerlError, WorkerError

logger = logging.getLogger(__name__)


class ScoringBackend(Protocol):
    """Where a reward model computes."""

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The output of the head at the last token of each sequence of token ids; RewardError where there is none."""
        ...

    def metrics(self) -> dict[str, float]:
        """Metrics of its last pass."""
        ...

    async def wake(self) -> None:
        """Prepare to score."""

    async def sleep(self) -> None:
        """Free the devices until `wake`."""


class ModelReward:
    """Scores answers by a reward model, all that wait at once in one pass. `backend` is set before the first is scored.

    `shares_devices`: the model computes where answers are sampled, so that none is scored while others are sampled.
    By `rules` a pass that fails is made again, and one that fails at last, or a score that is not finite, stops the run
    or (`on_error="count"`) is the error of its answers, of which `budget` allows some. What ends ranks stops the run.
    """

    backend: ScoringBackend
    is_async = True

    def __init__(self, reader: ConversationTokens, rules: CallRules, shares_devices: bool):
        self.reader, self.on_error, self.shares_devices = reader, rules.on_error, shares_devices
        self.weight, self.budget = (rules.weights or {}).get(RM, 1.0), ErrorBudget(rules.max_errors)
        self._calls = RetriedCalls(self, rules.retries, is_retriable=lambda outcome: is_passing(outcome.error))
        self._waiting: list[tuple[list[int], asyncio.Future[Outcome]]] = []
        self._passes: asyncio.Task[None] | None = None
        self._reported: set[str] = set()
        self._counts = {"sequences": 0.0, "tokens": 0.0, "passes": 0.0, "seconds": 0.0}

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        loop = asyncio.get_running_loop()
        added = [(list(self.reader.read(item)), loop.create_future()) for item in inputs]
        self._waiting += added
        if self._passes is None and added:
            self._passes = asyncio.create_task(self._score_waiting())  # when those that are ready have added theirs
        outcomes = await asyncio.gather(*(future for _, future in added))
        return [self._to_score(item, outcome) for item, outcome in zip(inputs, outcomes, strict=True)]

    async def _score_waiting(self) -> None:
        try:
            while self._waiting:
                part, self._waiting = self._waiting, []
                await self._score(part)
        finally:
            self._passes = None

    async def _score(self, part: Sequence[tuple[list[int], asyncio.Future[Outcome]]]) -> None:
        (done,) = await self._calls.call([{"sequences": [ids for ids, _ in part]}])
        values = [None] * len(part) if done.error is not None else done.result
        for (_, future), value in zip(part, values, strict=True):
            if not future.done():  # its prompt is no longer needed
                future.set_result(replace(done, result=value))

    async def call(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Outcomes of one pass per dict, of its `sequences`: a list of scores, or the error."""
        return [await self._pass(**kwargs) for kwargs in all_kwargs]

    async def _pass(self, sequences: Sequence[Sequence[int]]) -> Outcome:
        start = time.perf_counter()
        try:
            values = await self.backend.scores(sequences)
        except Exception as error:
            return Outcome(error=error)
        seconds, tokens = time.perf_counter() - start, sum(map(len, sequences))
        for name, count in (("sequences", len(sequences)), ("tokens", tokens), ("passes", 1), ("seconds", seconds)):
            self._counts[name] += count
        return Outcome(values)

    def _to_score(self, item: RewardInput, outcome: Outcome) -> Score:
        error, value, retries = outcome.error, outcome.result, len(outcome.earlier)
        if error is None:
            if math.isfinite(value):
                return Score(self.weight * value, {RM: value}, retries=retries)
            error = RewardError(f"the reward model's score is {value}; it must be finite")
        if self.on_error == "stop" or not is_passing(error):
            raise error
        text = str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}"
        self.budget.spend(f"{item.where}: {text}")
        if text not in self._reported and len(self._reported) < 20:
            self._reported.add(text)
            logger.warning("%s: %s; the answer is left out and counted in reward/errors", item.where, text)
        return Score(None, error=f"reward model: {text}", retries=retries)

    async def exchange_generators(self, states: str | None) -> None:
        """It draws no random numbers."""

    async def wake(self) -> None:
        await self.backend.wake()

    async def sleep(self) -> None:
        await self.backend.sleep()

    def metrics(self) -> dict[str, float]:
        """Metrics of what was scored since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        if not counts["passes"]:
            return {}
        speed = counts["tokens"] / max(counts["seconds"], 1e-9)
        own = {f"reward_model/{name}": value for name, value in counts.items()}
        return {**own, "reward_model/tokens_per_s": speed, **self.backend.metrics()}


def is_passing(error: BaseException | None) -> bool:
    """Whether the next pass may succeed: of our own errors one of a server, or of ranks that still run."""
    if isinstance(error, WorkerError):
        return not (error.is_death or error.is_stall)
    return isinstance(error, Exception) and (isinstance(error, RewardError) or not isinstance(error, VerlError))


class MixedReward:
    """The parts of a function and the score of a reward model, which is the part `rm`: the reward is their weighted
    sum. `counts_function`: parts of the function have weights. An answer without the score of either spends the budget
    of the model once."""

    is_async = True

    def __init__(self, function: Reward, model: ModelReward, counts_function: bool):
        self.function, self.model, self.counts_function = function, model, counts_function
        self.exchange_generators = function.exchange_generators

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        found, scored = await asyncio.gather(self.function.score(inputs), self.model.score(inputs))
        return [self._sum(*one) for one in zip(inputs, found, scored, strict=True)]

    def _sum(self, item: RewardInput, of_function: Score, of_model: Score) -> Score:
        """Their sum; without a value where one of them has none."""
        if RM in of_function.extra:
            raise RewardError(f"the reward function returns a part {RM!r}, the name of the reward model's; rename it")
        if of_function.error and not of_model.error:
            self.model.budget.spend(f"{item.where}: {of_function.error}")
        value = None
        if of_function.value is not None and of_model.value is not None:
            value = of_model.value + of_function.value * self.counts_function
        return Score(
            value,
            {**of_function.extra, **of_model.extra},
            of_function.error or of_model.error,
            of_function.retries + of_model.retries,
            of_function.processes_lost,
        )
