"""Sources of scored trajectories: their interface, and the synchronous one."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from verl.agent.agent_runner import AgentRunner
from verl.data.prompt_sampler import PromptSampler
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.observe.timers import StageSpan
from verl.observe.tracing.recorder import TraceRecorder
from verl.rewards.base import Reward, RewardInput, Score
from verl.trainer.ppo.sources.device_turns import SAMPLE, SCORE, DeviceTurns
from verl.trainer.ppo.sources.group_filter import FixedPrompts, Group, GroupFilter, GroupPlan, GroupRules
from verl.trainer.ppo.sources.prompt_engine import SampledSequence
from verl.trainer.ppo.sources.rollout_batch import CollectCounts, RolloutBatch
from verl.weight_sync.base import Receipt, WeightSync
from verl.workers.rollout.base import RolloutEngine, SamplingParams
from verl.workers.rollout.engine_stats import EngineStats, metrics_between

TOKENS_EVERY_S = 1.0  # how often the engine is asked how many tokens it has sampled


class RewardModelServing(Protocol):
    """A reward model, as far as the rollout has to know of it."""

    shares_devices: bool  # with the rollout: it wakes when nothing is sampled, and sleeps before anything is

    async def wake(self) -> None: ...

    async def sleep(self) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Metrics of its work since the last call."""
        ...


class Told(NamedTuple):
    """Hearers of a collection: the traces of its conversations, and how far it is."""

    traces: TraceRecorder | None = None
    on_answers: Callable[[CollectCounts], None] = lambda counts: None


class RolloutCollector:
    """Samples and scores answers of many prompts concurrently; each is scored as soon as it is complete, or, where the
    reward model computes on the rollout's devices, when all that are being sampled are."""

    def __init__(
        self,
        engine: RolloutEngine,
        reward: Reward,
        tokenizer: PreTrainedTokenizerBase,
        agent_runner: AgentRunner,
        free_cache: bool = False,
        reward_model: RewardModelServing | None = None,
        goes_on: bool = False,
        told: Told | None = None,
    ):
        self.reward_model = reward_model
        self.traces, self.on_answers = told or Told()
        self.engine, self.reward, self.tokenizer, self.agent_runner = engine, reward, tokenizer, agent_runner
        self.free_cache = free_cache
        self.goes_on = goes_on  # whether unfinished answers of training go on after a collection

    async def collect(
        self,
        rows: Sequence[PromptRow],
        request_ids: Sequence[int],
        sampling: SamplingParams,
        with_baselines: bool = False,
        before_update: bool = False,
    ) -> RolloutBatch:
        """Trajectories of all rows, in order. Those whose reward failed or abstained have no reward."""
        return await self.collect_groups(FixedPrompts(rows, request_ids), sampling, with_baselines, before_update)

    async def collect_groups(
        self, plan: GroupPlan, sampling: SamplingParams, with_baselines: bool = False, before_update: bool = False
    ) -> RolloutBatch:
        """Trajectories of the groups that `plan` picks, in its order; it names the prompts as they come to be due.

        `before_update`: weights are published before the next call, so that an engine may sleep without any.
        With baselines, one more answer per prompt is greedy: its reward is the `reward_baseline` of the others, which
        have no reward themselves where it has none. Answers that the plan no longer needs are aborted.
        """
        return await _Collection(self, plan, sampling, with_baselines).run(before_update)

    async def answered(
        self, row: PromptRow, request_id: int, sampling: SamplingParams, engine: RolloutEngine | None = None
    ) -> list[Trajectory]:
        """The trajectories of `sampling.n` conversations, by `engine` or the collector's own."""
        return await self.agent_runner.answer(row, request_id, sampling, engine or self.engine, self.traces)

    async def scored(self, row: PromptRow, trajectories: list[Trajectory]) -> Group:
        """The trajectories with their scores; what their agent loop has scored itself keeps that score."""
        start_ns = time.time_ns()
        texts = [str(self.tokenizer.decode(t.response_ids, skip_special_tokens=True)) for t in trajectories]
        inputs = [
            RewardInput.from_row(row, text, t)
            for t, text in zip(trajectories, texts, strict=True)
            if t.reward is None  # the others were scored by their agent loop
        ]
        new_scores = iter(await self.reward.score(inputs) if inputs else [])
        scores = [next(new_scores) if t.reward is None else Score(t.reward) for t in trajectories]
        group = [
            (t.with_reward(s.value, s.extra, row.data_source, text), s)
            for t, s, text in zip(trajectories, scores, texts, strict=True)
        ]
        if self.traces is not None:
            self.traces.scored([t for t, _ in group], [s.error for s in scores], start_ns)
        return group


class _Collection:
    """One call of `collect_groups`. Groups are numbered in the order in which their prompts came to be due."""

    def __init__(self, collector: RolloutCollector, plan: GroupPlan, sampling: SamplingParams, with_baselines: bool):
        self.collector, self.plan, self.sampling, self.with_baselines = collector, plan, sampling, with_baselines
        self.start, self.counts = time.perf_counter(), CollectCounts(0)
        self.generate_s, self.engine_stats = 0.0, dict[str, float]()
        self.rows: list[PromptRow] = []
        self.groups: dict[int, Group] = {}  # that are scored
        self.generating: dict[int, asyncio.Task[None]] = {}
        self.any_aborted = False
        shared = collector.reward_model is not None and collector.reward_model.shares_devices
        self.model = collector.reward_model if shared else None  # it takes turns with the rollout
        self.turns = DeviceTurns({SAMPLE: self._begin_sampling, SCORE: self._begin_scoring})
        self.before_update, self.stats_before = False, list[EngineStats]()

    async def run(self, before_update: bool) -> RolloutBatch:
        """Wake the engine, answer and score what the plan asks for; with `free_cache` let the engine sleep again."""
        engine, first = self.collector.engine, self._next_prompts()
        self.before_update = before_update
        await engine.wake()
        await engine.resume()  # unfinished answers of training go on beside a validation
        self.stats_before = stats_before = await engine.stats()
        watcher = asyncio.create_task(self._watch_tokens(stats_before))
        try:
            async with asyncio.TaskGroup() as self.tasks:
                self._send(first)
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None  # the others were cancelled because of it
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        if self.any_aborted:
            await engine.abort()  # returns when none of them runs on: the engine may sleep or get new weights
        if self.model is not None and self.turns.now == SCORE:  # the rollout sleeps already, where it has to
            await self.model.sleep()
            return self._result()
        self.engine_stats = metrics_between(stats_before, await engine.stats())
        if engine.can_park and not before_update and not self.collector.goes_on:
            await engine.park()
        if self.collector.free_cache:
            await self._let_rollout_sleep(last=True)
        return self._result()

    async def _let_rollout_sleep(self, last: bool) -> None:
        """Where it is the `last` time before weights are published, an engine may drop them."""
        engine = self.collector.engine
        await (engine.sleep_until_update() if self.before_update and last else engine.sleep())

    async def _begin_scoring(self) -> None:
        """All answers are there that were to be sampled: the reward model has the devices."""
        self.engine_stats = metrics_between(self.stats_before, await self.collector.engine.stats())
        if self.collector.free_cache:
            await self._let_rollout_sleep(last=isinstance(self.plan, FixedPrompts))
        assert self.model is not None
        await self.model.wake()

    async def _begin_sampling(self) -> None:
        assert self.model is not None
        await self.model.sleep()
        await self.collector.engine.wake()

    def _turn(self, turn: str) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext() if self.model is None else self.turns.take(turn)

    def _next_prompts(self) -> Sequence[tuple[PromptRow, int]]:
        """The prompts to send now, which are counted."""
        prompts = self.plan.next_prompts()
        self.counts.add(total=self.sampling.n * len(prompts))
        if prompts:
            self.collector.on_answers(self.counts)
        return prompts

    def _send(self, prompts: Sequence[tuple[PromptRow, int]]) -> None:
        for row, request_id in prompts:
            number = len(self.rows)
            self.rows.append(row)
            self.generating[number] = self.tasks.create_task(self._answer_prompt(number, row, request_id))

    async def _answer_prompt(self, number: int, row: PromptRow, request_id: int) -> None:
        """Answer and score one prompt; then send the prompts that come to be due, or abort those in flight."""
        async with asyncio.TaskGroup() as pair:
            baseline = pair.create_task(self._greedy_score(row, -1 - request_id)) if self.with_baselines else None
            trajectories = await self._answers(row, request_id, self.sampling)
            self.generating.pop(number, None)  # an answer that is there is scored, needed or not
            self.counts.add(answered=self.sampling.n)
            self.collector.on_answers(self.counts)
            answers = await self._score(row, trajectories)
            self.counts.add(scored=self.sampling.n)
            self.collector.on_answers(self.counts)
        if baseline is not None:
            answers = with_baseline(answers, baseline.result())
        self.groups[number] = answers
        self.plan.add(number, answers)
        if self.plan.complete:
            self._abort_surplus()
        else:
            self._send(self._next_prompts())

    async def _answers(self, row: PromptRow, request_id: int, sampling: SamplingParams) -> list[Trajectory]:
        async with self._turn(SAMPLE):
            trajectories = await self.collector.answered(row, request_id, sampling)
        self.generate_s = time.perf_counter() - self.start
        return trajectories

    async def _score(self, row: PromptRow, trajectories: list[Trajectory]) -> Group:
        async with self._turn(SCORE):
            return await self.collector.scored(row, trajectories)

    async def _greedy_score(self, row: PromptRow, request_id: int) -> Score:  # its ids are below 0
        trajectories = await self._answers(row, request_id, greedy(self.sampling))
        return mean_score([score for _, score in await self._score(row, trajectories)])

    def _abort_surplus(self) -> None:
        surplus, self.generating = self.generating, {}
        for task in surplus.values():
            task.cancel()
        self.any_aborted |= bool(surplus)

    async def _watch_tokens(self, before: Sequence[EngineStats]) -> None:
        """Keep `counts.tokens` up to date, so that long answers are seen to grow."""
        while True:
            await asyncio.sleep(TOKENS_EVERY_S)
            now = metrics_between(before, await self.collector.engine.stats())
            self.counts.add(tokens=int(now.get("generated_tokens", 0)) - self.counts.tokens)
            self.collector.on_answers(self.counts)

    def _result(self) -> RolloutBatch:
        plan, groups, model = self.plan, self.groups, self.collector.reward_model
        return RolloutBatch.of(
            [self.rows[number] for number in plan.picked],
            [pair for number in plan.picked for pair in groups[number]],
            [score for number in range(plan.consumed) for _, score in groups[number]],
            generate_s=self.generate_s,
            reward_s=time.perf_counter() - self.start - self.generate_s,
            engine_stats=self.engine_stats,
            metrics=plan.metrics() | ({} if model is None else model.metrics()),
        )


def greedy(sampling: SamplingParams) -> SamplingParams:
    """One answer of the most likely tokens, with the other limits of `sampling`."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1, n=1)


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean of one conversation's scores; the first that has no value, if there is one."""
    without = next((score for score in scores if score.value is None), None)
    return without or Score(sum(score.value or 0.0 for score in scores) / len(scores))


def with_baseline(answers: Group, baseline: Score) -> Group:
    """The answers to a prompt with the reward of its greedy answer; without it they cannot be compared."""
    return [
        (
            replace(t, reward=t.reward if baseline.value is not None else None, reward_baseline=baseline.value),
            s if baseline.value is not None else baseline,
        )
        for t, s in answers
    ]


def first_failure(failure: BaseException) -> BaseException:
    """The exception that ended a group of tasks."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure


class TrajectorySource(Protocol):
    """Where the trainer's scored trajectories come from; all that the trainer asks of it. A source derives from it, and
    leaves what has a body here as it is, if nothing is under way between two `take`s."""

    goes_on: bool = False  # whether answers are sampled while the policy is trained

    @property
    def epoch(self) -> int:
        """The epoch of the prompts last taken, from 0."""

    async def take(self, num_prompts: int) -> RolloutBatch:
        """The trajectories of `num_prompts` prompts, to train on next."""

    async def publish(self, weight_sync: WeightSync, version: int) -> Receipt:
        """Publish `version`, and let what is under way go on by it."""
        return await weight_sync.publish(version)

    async def under_way(self) -> list[SampledSequence]:
        """All that was sampled of the groups that no step has taken, complete or not."""
        return []

    def note_stages(self, spans: Sequence[StageSpan]) -> None:
        """When each stage of a step began and how long it took; those that hold others included."""
        return

    async def saved(self) -> dict[str, Any]:
        """`state_dict`, with what is under way as it is now."""
        return self.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """JSON values from which `load_state_dict` goes on with the same prompts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after `state`."""

    def close(self) -> None:
        """Close the rollout engine."""


class SyncSource(TrajectorySource):
    """Takes prompts in data order and waits for all answers of a batch. Staleness is 0.

    With `rules`, it replaces groups that cannot be trained on (`GroupFilter`). Then the prompts are a stream that knows
    no batches: none is left out at the end of an epoch, and the next step begins after the last prompt that this one
    needed.
    """

    def __init__(
        self,
        prompts: PromptSampler,
        collector: RolloutCollector,
        sampling: SamplingParams,
        with_baselines: bool = False,
        rules: GroupRules | None = None,
    ):
        self.prompts, self.collector, self.sampling = prompts, collector, sampling
        self.with_baselines = with_baselines  # one greedy answer per prompt more
        self.rules = rules or GroupRules()
        self._next_request = 0

    async def take(self, num_prompts: int) -> RolloutBatch:
        """The next `num_prompts` groups, each answered `sampling.n` times by the published weights.

        Weights are published before the next call.
        """
        if self.rules.replace_groups:
            return await self._take_filtered(num_prompts)
        size = self.rules.gen_batch_size or num_prompts
        rows = [row for _ in range(num_prompts // size) for row in self.prompts.take(size)]
        first, self._next_request = self._next_request, self._next_request + num_prompts
        numbers = range(first, first + num_prompts)
        return await self.collector.collect(rows, numbers, self.sampling, self.with_baselines, before_update=True)

    async def _take_filtered(self, num_prompts: int) -> RolloutBatch:
        positions = [self.prompts.position]
        first_request = self._next_request

        def draw(count: int) -> list[tuple[PromptRow, int]]:
            prompts = []
            for _ in range(min(count, len(self.prompts) - len(positions) + 1)):  # each row once a step
                prompts.append((self.prompts.take(1)[0], first_request + len(positions) - 1))
                positions.append(self.prompts.position)
            return prompts

        plan = GroupFilter(num_prompts, self.rules, draw)
        try:
            batch = await self.collector.collect_groups(plan, self.sampling, self.with_baselines, before_update=True)
        finally:
            self.prompts.go_to(positions[plan.consumed])
        self._next_request += plan.consumed
        return batch

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
