"""The score of a reward model as a reward: alone, or as the part `rm` beside the parts of a function."""

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from typing import Protocol

from verl.config.reward import RM
from verl.rewards.base import Reward, RewardInput, Score
from verl.rewards.conversation_tokens import ConversationTokens
from verl.utils.errors import RewardError

logger = logging.getLogger(__name__)


class ScoringBackend(Protocol):
    """Where a reward model computes."""

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The output of the head at the last token of each sequence of token ids; RewardError where there is none."""
        ...

    def metrics(self) -> dict[str, float]:
        """What it says of its last pass."""
        ...

    async def wake(self) -> None:
        """Prepare to score."""

    async def sleep(self) -> None:
        """Free the devices until `wake`."""


class ModelReward:
    """Scores answers by a reward model, all that wait at once in one pass. `backend` is set before the first is scored.

    `shares_devices`: the model computes where answers are sampled, so that none is scored while others are sampled.
    A pass that fails, or a score that is not finite, stops the run, or with `on_error="count"` is the error of its
    answers.
    """

    backend: ScoringBackend

    def __init__(self, reader: ConversationTokens, on_error: str, weight: float, shares_devices: bool):
        self.reader, self.on_error, self.weight, self.shares_devices = reader, on_error, weight, shares_devices
        self._waiting: list[tuple[list[int], asyncio.Future[float]]] = []
        self._passes: asyncio.Task[None] | None = None
        self._reported: set[str] = set()
        self._counts = {"sequences": 0.0, "tokens": 0.0, "passes": 0.0, "seconds": 0.0}

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        loop = asyncio.get_running_loop()
        added = [(list(self.reader.read(item)), loop.create_future()) for item in inputs]
        self._waiting += added
        if self._passes is None and added:
            self._passes = asyncio.create_task(self._score_waiting())  # when those that are ready have added theirs
        values = await asyncio.gather(*(future for _, future in added), return_exceptions=True)
        return [self._to_score(item, value) for item, value in zip(inputs, values, strict=True)]

    async def _score_waiting(self) -> None:
        try:
            while self._waiting:
                part, self._waiting = self._waiting, []
                await self._score(part)
        finally:
            self._passes = None

    async def _score(self, part: Sequence[tuple[list[int], asyncio.Future[float]]]) -> None:
        start = time.perf_counter()
        try:
            values = await self.backend.scores([ids for ids, _ in part])
        except Exception as error:
            for _, future in part:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), value in zip(part, values, strict=True):
            if not future.done():  # its prompt is no longer needed
                future.set_result(value)
        seconds, tokens = time.perf_counter() - start, sum(len(ids) for ids, _ in part)
        for name, count in (("sequences", len(part)), ("tokens", tokens), ("passes", 1), ("seconds", seconds)):
            self._counts[name] += count

    def _to_score(self, item: RewardInput, value: float | BaseException) -> Score:
        if not isinstance(value, BaseException):
            if math.isfinite(value):
                return Score(self.weight * value, {RM: value})
            value = RewardError(f"the reward model's score is {value}; it must be finite")
        if self.on_error == "count" and isinstance(value, RewardError):
            if str(value) not in self._reported and len(self._reported) < 20:
                self._reported.add(str(value))
                logger.warning("%s: %s; the answer is left out and counted in reward/errors", item.where, value)
            return Score(None, error=f"reward model: {value}")
        raise value

    async def wake(self) -> None:
        await self.backend.wake()

    async def sleep(self) -> None:
        await self.backend.sleep()

    def metrics(self) -> dict[str, float]:
        """What was scored since the last call."""
        counts, self._counts = self._counts, dict.fromkeys(self._counts, 0.0)
        if not counts["passes"]:
            return {}
        speed = counts["tokens"] / max(counts["seconds"], 1e-9)
        own = {f"reward_model/{name}": value for name, value in counts.items()}
        return {**own, "reward_model/tokens_per_s": speed, **self.backend.metrics()}


class MixedReward:
    """The parts of a function and the score of a reward model, which is the part `rm`: the reward is their weighted
    sum. `counts_function`: parts of the function have weights."""

    def __init__(self, function: Reward, model: ModelReward, counts_function: bool):
        self.function, self.model, self.counts_function = function, model, counts_function

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        found, scored = await asyncio.gather(self.function.score(inputs), self.model.score(inputs))
        return [self._sum(*pair) for pair in zip(found, scored, strict=True)]

    def _sum(self, of_function: Score, of_model: Score) -> Score:
        """Their sum; without a value where one of them has none."""
        if RM in of_function.extra:
            raise RewardError(f"the reward function returns a part {RM!r}, the name of the reward model's; rename it")
        extra = {**of_function.extra, **of_model.extra}
        if of_function.value is None or of_model.value is None:
            return Score(None, extra, of_function.error or of_model.error)
        return Score(of_model.value + of_function.value * self.counts_function, extra)
