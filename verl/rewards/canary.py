"""Fixed answers that are scored again at every step, so that a reward that changes while a policy learns is named."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from verl.config import RewardConfig
from verl.observe.run_changes import changes_between
from verl.rewards.base import Reward, RewardInput, Score
from verl.rewards.gold_answers import FORMS, gold_texts, worked_answer
from verl.utils.errors import RewardError

T = TypeVar("T")
logger = logging.getLogger(__name__)
DEFAULT_SIZE = 8
CHEAP_MANAGERS = ("naive", "gdpo", "dapo")  # whose calls run here, one per answer, and are assumed to cost no money
MAX_BYTES = 1 << 18  # of an answer and its row in a checkpoint
CAUSES = (
    "Rewards before and after cannot be compared. Likely causes: a global, a cache or a seed that calls change; a "
    "service, a model or a file that the function asks; hash(), the locale or the clock. `verl check-reward` with the "
    "arguments of this run looks for them. Where scores may vary, set reward.canary_on_change=drift"
)
CAUSES_AFTER_RESUME = (
    "The function, or what it imports or reads, was changed since the checkpoint was saved, or it depends on the "
    "process (hash(), the locale, the environment). Put it back, or if the change is wanted, resume once with "
    "reward.canary_size=0"
)


class Canary:
    """A reward that keeps some of the answers that it scores first, and scores them again `beside` each later step.

    Their first scores are taken twice. Where both are equal (or `on_change` is "stop"), a score that changes is a
    RewardError; otherwise (or with "drift") `metrics` say how far the scores are from the first ones.
    """

    def __init__(self, reward: Reward, config: RewardConfig):
        self._reward, self._config = reward, config
        self.is_async, self.exchange_generators = reward.is_async, reward.exchange_generators
        self._size = DEFAULT_SIZE if config.canary_size is None else config.canary_size
        self._candidates: list[RewardInput] = []
        self._answers: list[RewardInput] = []
        self._first: list[float] = []  # scores
        self._first_step, self._last_step, self._resumed = 0, 0, False
        self._repeats = False  # whether a score that changes is an error
        self._said = False  # that fixed answers failed
        self._alone = False  # its calls draw random numbers: nothing else may run, so that these can be given back
        self.metrics: dict[str, float] = {}  # of the last step

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """The reward's scores; the first answer of a prompt becomes a candidate while they are sought."""
        scores = await self._reward.score(inputs)
        if not self._answers and len(self._candidates) < self._size:
            fit = (item for item, score in zip(inputs, scores, strict=True) if has_value(score) and is_storable(item))
            self._candidates += [item for item in [next(fit, None)] if item is not None]
        return scores

    async def beside(self, work: Callable[[], Coroutine[Any, Any, T]], step: int) -> T:
        """Runs `work`, which scores the answers of a step or of a part of it, and returns its result. In the first part
        the fixed answers are scored meanwhile."""
        if self._answers and step == self._last_step:
            return await work()
        self.metrics, self._last_step = {}, step
        if not self._answers:
            result = await work()
            if self._candidates:
                await self._begin(step)
            return result
        if self._alone or self._resumed:
            async with self._generators_kept():
                await self._check(step)
            return await work()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._check(step))
                working = group.create_task(work())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the other was cancelled because of it
        return working.result()

    async def _begin(self, step: int) -> None:
        """Fix the answers: half of them gold answers, where these are known, and the others sampled in this step."""
        golds = [gold for item in self._candidates if (gold := gold_answer(item))][: self._size // 2]
        if self._config.on_error == "count":  # those that fail would be counted as answers of the policy
            golds = []
        try:
            pairs = await self._score_twice(golds + self._candidates[: self._size - len(golds)])
        except RewardError as error:  # of a function that cannot read our gold answers
            logger.warning("the reward fails for gold answers, which the canary set then goes without: %.300s", error)
            pairs = await self._score_twice(self._candidates)
        self._say_failed([(item, one if one.error else two) for item, one, two in pairs])
        kept = [(item, one.value, two.value) for item, one, two in pairs if has_value(one) and has_value(two)]
        self._answers, self._first = [item for item, *_ in kept], [float(value or 0) for _, value, _ in kept]
        mode = self._config.canary_on_change
        self._repeats = mode == "stop" or (mode == "auto" and all(one == two for _, one, two in kept))
        self._first_step, self._candidates = step, []

    async def _score_twice(self, answers: Sequence[RewardInput]) -> list[tuple[RewardInput, Score, Score]]:
        marked = [replace(item, where=f"{item.where or 'a row'} (of the canary set)") for item in answers]
        async with self._generators_kept():  # around both, or the second would draw the numbers of the first
            first, second = [await self._reward.score(marked) for _ in range(2)]
        return list(zip(marked, first, second, strict=True))

    @contextlib.asynccontextmanager
    async def _generators_kept(self) -> AsyncIterator[None]:
        """The random numbers that calls inside draw are given back to the generators of their process."""
        before = await self._reward.exchange_generators(None)
        try:
            yield
        finally:
            self._alone |= await self._reward.exchange_generators(before) != before

    async def _check(self, step: int) -> None:
        start = time.perf_counter()
        scores = await self._reward.score(self._answers)
        rows = zip(self._answers, self._first, scores, strict=True)
        pairs = [(item, old, float(score.value or 0)) for item, old, score in rows if has_value(score)]
        self._say_failed(list(zip(self._answers, scores, strict=True)))
        changed = [pair for pair in pairs if pair[1] != pair[2]]
        if changed and self._repeats:
            raise RewardError(self._message(step, changed))
        self._resumed = False
        sizes = [abs(old - new) for _, old, new in pairs] or [0.0]
        self.metrics = {
            "reward/canary/change/mean": sum(sizes) / len(sizes),
            "reward/canary/change/max": max(sizes),
            "reward/canary/failed": float(len(scores) - len(pairs)),
            "reward/canary/time_s": time.perf_counter() - start,
        }

    def _say_failed(self, scored: Sequence[tuple[RewardInput, Score]]) -> None:
        """Say once that the reward fails for fixed answers: no metric of the policy's answers shows it."""
        failed = [f"{item.where}: {str(score.error)[:300]}" for item, score in scored if score.error]
        if failed and not self._said:
            which = "fixed answers (the canary set, docs/rewards/check_reward.md)"
            logger.warning(f"the reward fails for %d of %d {which}, first %s", len(failed), len(scored), failed[0])
        self._said |= bool(failed)

    def _message(self, step: int, changed: list[tuple[RewardInput, float, float]]) -> str:
        lines = [f"  {i.where}: {old:g} -> {new:g}, answer {i.solution_str[:200]!r}" for i, old, new in changed[:3]]
        return (
            f"step {step}: the reward gives other scores than at step {self._first_step} to {len(changed)} of "
            f"{len(self._answers)} fixed answers (the canary set, docs/rewards/check_reward.md):\n"
            + "\n".join(lines)
            + f"\n{CAUSES_AFTER_RESUME if self._resumed else CAUSES}"
        )

    def state_dict(self) -> dict[str, Any]:
        """The answers with their first scores, and the settings of the reward that gave these."""
        return {
            "answers": [item.as_text() for item in self._answers],
            "scores": self._first,
            "step": self._first_step,
            "repeats": self._repeats,
            "settings": settings_of(self._config),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the answers of `state`, unless the run has other settings of its reward now; settings that only
        one version of the library knows do not count."""
        if state and not list(changes_between(state["settings"], settings_of(self._config))):
            self._answers, self._first = [RewardInput(**item) for item in state["answers"]], state["scores"]
            self._first_step, self._repeats = state["step"], state["repeats"]
            self._resumed = bool(self._answers)


def canary_of(config: RewardConfig, reward: Reward) -> Canary | None:
    """The canary of a run; None with reward.canary_size=0, and by default where a call may cost money."""
    if config.canary_size == 0 or (config.canary_size is None and may_cost_money(config, reward)):
        return None
    return Canary(reward, config)


def may_cost_money(config: RewardConfig, reward: Reward) -> bool:
    """Whether calls ask a service, as far as can be seen: a reward model, an async function, an unknown manager."""
    if config.reward_model.enable or config.reward_manager.name not in CHEAP_MANAGERS:
        return True
    return reward.is_async


def gold_answer(item: RewardInput) -> RewardInput | None:
    """The same row answered by its worked answer, or by its ground truth in every form that scorers read."""
    texts = gold_texts(item.ground_truth)
    text = worked_answer(item.extra_info) or ("\n".join(form.format(texts[0]) for form in FORMS) if texts else None)
    where = f"the gold answer of {item.where}"
    return replace(item, solution_str=text, answer=None, where=where) if text else None


def has_value(score: Score) -> bool:
    """Whether it says something: a comparison that was killed at its limit depends on how busy the machine is."""
    return score.value is not None and not score.extra.get("undecided")


def is_storable(item: RewardInput) -> bool:
    """Whether JSON holds the answer and its row as they are, in at most MAX_BYTES."""
    try:
        text = json.dumps(item.as_text())
        return len(text) <= MAX_BYTES and bool(json.loads(text) == item.as_text())
    except (TypeError, ValueError, RecursionError):
        return False


def settings_of(config: RewardConfig) -> dict[str, Any]:
    """The settings of the reward, in JSON: a change of them changes scores."""
    settings = {key: value for key, value in asdict(config).items() if not key.startswith("canary_")}
    return dict(json.loads(json.dumps(settings, default=str)))
