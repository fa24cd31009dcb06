"""Sources of scored trajectories: their interface, and the synchronous one."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from verl.agent.agent_runner import AgentRunner
from verl.data.prompt_sampler import PromptSampler
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.rewards.base import Reward, RewardInput, Score
from verl.workers.rollout.base import RolloutEngine, SamplingParams
from verl.workers.rollout.engine_stats import EngineStats, metrics_between

TOKENS_EVERY_S = 1.0  # how often the engine is asked how many tokens it has sampled


@dataclass
class RolloutBatch:
    """Scored trajectories, grouped prompt by prompt, and the prompts they answer.

    The lists are left out of its repr, which asyncio calls four times a step.
    """

    trajectories: list[Trajectory] = field(default_factory=list, repr=False)
    rows: list[PromptRow] = field(default_factory=list, repr=False)  # one per prompt, in order
    generate_s: float = 0.0  # until the last answer was complete
    reward_s: float = 0.0  # from then until the last was scored
    num_reward_errors: int = 0
    num_abstained: int = 0
    scores: list[Score] = field(default_factory=list, repr=False)  # one per trajectory
    engine_stats: dict[str, float] = field(default_factory=dict)  # metrics of the rollout engine meanwhile


@dataclass
class CollectCounts:
    """How far the answers to some prompts are."""

    total: int
    answered: int = 0
    scored: int = 0
    tokens: int = 0  # sampled, also of unfinished answers; 0 where the engine does not say

    def text(self) -> str:
        """`64 of 512 answers, 8,300 tokens`, or how many are scored once all are there."""
        if self.answered == self.total and self.scored < self.total:
            return f"{self.scored:,} of {self.total:,} answers scored"
        return f"{self.answered:,} of {self.total:,} answers" + (f", {self.tokens:,} tokens" if self.tokens else "")


class RolloutCollector:
    """Samples and scores answers of many prompts concurrently; each is scored as soon as it is complete."""

    def __init__(
        self,
        engine: RolloutEngine,
        reward: Reward,
        tokenizer: PreTrainedTokenizerBase,
        agent_runner: AgentRunner,
        free_cache: bool = False,
    ):
        self.engine, self.reward, self.tokenizer, self.agent_runner = engine, reward, tokenizer, agent_runner
        self.free_cache = free_cache
        self.on_answers: Callable[[CollectCounts], None] = lambda counts: None

    async def collect(
        self,
        rows: Sequence[PromptRow],
        request_ids: Sequence[int],
        sampling: SamplingParams,
        with_baselines: bool = False,
    ) -> RolloutBatch:
        """Trajectories of all rows, in order. Those whose reward failed or abstained have no reward.

        With baselines, one more answer per prompt is greedy: its reward is the `reward_baseline` of the others, which
        have no reward themselves where it has none.
        """
        start, counts = time.perf_counter(), CollectCounts(len(rows) * sampling.n)
        out = RolloutBatch(rows=list(rows))
        self.on_answers(counts)
        await self.engine.wake()
        stats_before = await self.engine.stats()

        async def answer_prompt(row: PromptRow, request_id: int) -> list[tuple[Trajectory, Score]]:
            trajectories = await self.agent_runner.answer(row, request_id, sampling, self.engine)
            out.generate_s = time.perf_counter() - start
            counts.answered += sampling.n
            self.on_answers(counts)
            pairs = await scored(row, trajectories)
            counts.scored += sampling.n
            self.on_answers(counts)
            return pairs

        async def greedy_answer(row: PromptRow, request_id: int) -> Score:
            trajectories = await self.agent_runner.answer(row, request_id, greedy(sampling), self.engine)
            out.generate_s = time.perf_counter() - start
            return mean_score([found for _, found in await scored(row, trajectories)])

        async def scored(row: PromptRow, trajectories: list[Trajectory]) -> list[tuple[Trajectory, Score]]:
            texts = [str(self.tokenizer.decode(t.response_ids, skip_special_tokens=True)) for t in trajectories]
            inputs = [
                RewardInput.from_row(row, text, t)
                for t, text in zip(trajectories, texts, strict=True)
                if t.reward is None  # the others were scored by their agent loop
            ]
            new_scores = iter(await self.reward.score(inputs) if inputs else [])
            scores = [next(new_scores) if t.reward is None else Score(t.reward) for t in trajectories]
            return [
                (t.with_reward(s.value, s.extra, row.data_source, text), s)
                for t, s, text in zip(trajectories, scores, texts, strict=True)
            ]

        watcher = asyncio.create_task(self._watch_tokens(counts, stats_before))
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(answer_prompt(row, i)) for row, i in zip(rows, request_ids, strict=True)]
                prompts = zip(rows, request_ids if with_baselines else (), strict=False)
                greedy_tasks = [group.create_task(greedy_answer(row, -1 - i)) for row, i in prompts]  # ids of their own
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None  # the others were cancelled because of it
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        out.engine_stats = metrics_between(stats_before, await self.engine.stats())
        if self.free_cache:
            await self.engine.sleep()
        answers = [task.result() for task in tasks]
        if with_baselines:
            answers = [with_baseline(a, task.result()) for a, task in zip(answers, greedy_tasks, strict=True)]
        for trajectory, score in (pair for pairs in answers for pair in pairs):
            out.trajectories.append(trajectory)
            out.scores.append(score)
            out.num_reward_errors += score.error is not None
            out.num_abstained += score.value is None and score.error is None
        out.reward_s = time.perf_counter() - start - out.generate_s
        return out

    async def _watch_tokens(self, counts: CollectCounts, before: Sequence[EngineStats]) -> None:
        """Keep `counts.tokens` up to date, so that long answers are seen to grow."""
        while True:
            await asyncio.sleep(TOKENS_EVERY_S)
            counts.tokens = int(metrics_between(before, await self.engine.stats()).get("generated_tokens", 0))
            self.on_answers(counts)


def greedy(sampling: SamplingParams) -> SamplingParams:
    """One answer of the most likely tokens, with the other limits of `sampling`."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, n=1)


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean of one conversation's scores; the first that has no value, if there is one."""
    without = next((score for score in scores if score.value is None), None)
    return without or Score(sum(score.value or 0.0 for score in scores) / len(scores))


def with_baseline(answers: list[tuple[Trajectory, Score]], baseline: Score) -> list[tuple[Trajectory, Score]]:
    """The answers to a prompt with the reward of its greedy answer; without it they cannot be compared."""
    return [
        (
            replace(t, reward=t.reward if baseline.value is not None else None, reward_baseline=baseline.value),
            s if baseline.value is not None else baseline,
        )
        for t, s in answers
    ]


def first_failure(group: BaseExceptionGroup) -> BaseException:
    """The exception that ended a group of tasks."""
    failure: BaseException = group
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


class TrajectorySource(Protocol):
    """Where the trainer's scored trajectories come from; all that the trainer asks of it."""

    @property
    def epoch(self) -> int:
        """The epoch of the prompts last taken, from 0."""

    async def take(self, num_prompts: int) -> RolloutBatch:
        """The trajectories of `num_prompts` prompts, to train on next."""

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which `load_state_dict` goes on with the same prompts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`."""

    def close(self) -> None:
        """Close the rollout engine."""


class SyncSource:
    """Takes prompts in data order and waits for all answers of a batch. Staleness is 0."""

    def __init__(
        self,
        prompts: PromptSampler,
        collector: RolloutCollector,
        sampling: SamplingParams,
        with_baselines: bool = False,
    ):
        self.prompts, self.collector, self.sampling = prompts, collector, sampling
        self.with_baselines = with_baselines  # one greedy answer per prompt more
        self._next_request = 0

    async def take(self, num_prompts: int) -> RolloutBatch:
        """The next `num_prompts` prompts, each answered `sampling.n` times by the published weights."""
        rows = self.prompts.take(num_prompts)
        request_ids = range(self._next_request, self._next_request + num_prompts)
        self._next_request += num_prompts
        return await self.collector.collect(rows, list(request_ids), self.sampling, self.with_baselines)

    @property
    def epoch(self) -> int:
        return self.prompts.epoch

    def close(self) -> None:
        self.collector.engine.close()

    def state_dict(self) -> dict[str, Any]:
        return {"prompts": self.prompts.state_dict(), "next_request": self._next_request}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.prompts.load_state_dict(state["prompts"])
        self._next_request = state["next_request"]
