"""Trajectories from prompts that stay under way while the policy is trained (asynchronous training).

    who                       does                              waits for                   is woken by
    ------------------------  --------------------------------  --------------------------  ----------------------------
    `_admit`                  sends prompts, one task each      nothing: sends what fits    `published`; an eviction
    `_answer`, a task each    answers a prompt, scores it       the engine, the reward      the engine, the reward
    `take`, in the step       takes the oldest finished groups  `_until_ready`, then their  `_changed`, which every end
                                                                scores                      of an `_answer` sets
    `publish`, in the step    gives the engine new weights      an engine that must park    the engine
    `published`               lets answers go on, admits more   `_until_sent`: two turns    the event loop

With devices of its own (`goes_on`) the tasks run beside the step, and `publish` ends with `published`. On the trainer's
devices they run inside `take`, which begins with `published` and ends by parking the engine.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.algorithms.old_logprobs import SCORED
from verl.data.prompt_sampler import PromptSampler
from verl.data.prompts import PromptRow
from verl.data.trajectory import Trajectory
from verl.observe.events import EventLog
from verl.observe.served_requests import GroupRequests
from verl.observe.timers import StageSpan
from verl.trainer.ppo.facts import RunFacts
from verl.trainer.ppo.sources.admission import AdmissionRules
from verl.trainer.ppo.sources.async_metrics import AsyncCounts, IdleClock, StepTally, step_metrics
from verl.trainer.ppo.sources.group_filter import Group, GroupRules, verdict_on
from verl.trainer.ppo.sources.prompt_engine import PromptEngine, SampledSequence
from verl.trainer.ppo.sources.saved_groups import by_position, trajectories_as_json, trajectories_from_json
from verl.trainer.ppo.sources.trajectory_source import (
    CollectCounts,
    RolloutBatch,
    RolloutCollector,
    TrajectorySource,
    first_failure,
    greedy,
    mean_score,
    with_baseline,
)
from verl.utils.errors import VerlError
from verl.weight_sync.base import Receipt, WeightSync
from verl.workers.rollout.base import GenerationRequest, RolloutEngine, SamplingParams
from verl.workers.rollout.engine_stats import EngineStats, metrics_between
from verl.workers.rollout.saved_requests import requests_as_json, requests_from_json


@dataclass(eq=False)
class Flight:
    """A group under way: its prompt, its answers once they are complete, and the task that answers and scores it."""

    number: int  # also the id of its request
    row: PromptRow
    version: int  # published when it was admitted
    answers: list[Trajectory] | None = None  # these and the next may be complete at different times
    greedy: list[Trajectory] | None = None  # the answer whose reward is the baseline of the others, if there is one
    task: "asyncio.Task[Group] | None" = None
    engine: PromptEngine | None = None  # where the trainer scores what each version has sampled


class AsyncSource(TrajectorySource):
    """Keeps (1 + staleness) x batch groups under way; a step takes the oldest finished ones (`AdmissionRules`).

    Between `take`s the engine is parked: what is unfinished waits for the next weights and goes on under them. With
    `goes_on` the engine has devices of its own and is never parked; `published` sends prompts for new weights. A group
    is finished when its last answer is complete; scoring goes on beside generation, and a step waits for the scores
    of what it takes. So which groups a step takes does not depend on how fast a reward function is, unless groups are
    evicted by their scores.
    """

    def __init__(
        self,
        prompts: PromptSampler,
        collector: RolloutCollector,
        sampling: SamplingParams,
        admission: AdmissionRules,
        rules: GroupRules,
        events: EventLog,
        facts: RunFacts,
        goes_on: bool = False,
    ):
        self.prompts, self.collector, self.sampling = prompts, collector, sampling
        self.admission, self.rules, self.events, self.goes_on = admission, rules, events, goes_on
        self.with_baselines, self.scores_versions = facts.baselines, facts.old_logprobs == SCORED
        self.idle = IdleClock()
        self.flights: dict[int, Flight] = {}  # by number; in flight or queued
        self.counts = AsyncCounts()
        self._drawn: deque[PromptRow] = deque()  # of the sampler's last batch, not admitted yet
        self._changed = asyncio.Event()
        self._saved: dict[str, Any] | None = None  # what a checkpoint had under way, until the first `take`
        self._evicted: list[Group] = []
        self._step = StepTally()
        # of an engine that goes on: at the last `take` of the step before, and at the last one
        self._stats_before: list[EngineStats] | None = None
        self._last_stats: list[EngineStats] | None = None
        self._last_take_ended = time.perf_counter()
        self._parked_at = 0.0  # of an engine that does not go on: when it was parked last

    async def take(self, num_prompts: int) -> RolloutBatch:
        """The oldest finished groups, scored, in the order of their prompts; waits until there are enough. A step that
        takes its groups in parts has its metrics, and those of the engine, with the last one."""
        engine, start = self.collector.engine, time.perf_counter()
        trained_s = start - self._last_take_ended
        await engine.wake()
        stats_before = self._stats_before or await engine.stats()
        if not self.goes_on:
            await self.published(engine.version, time.perf_counter() - self._parked_at if self._parked_at else None)
        self._step.add_training(trained_s)
        await self._until_ready(num_prompts)
        if engine.can_park and not self.goes_on:
            await engine.park()
            self._parked_at = time.perf_counter()
        taken = [self.flights.pop(number) for number in self.admission.take(num_prompts)]
        generate_s = time.perf_counter() - start
        groups = [await self._scored(flight) for flight in taken]
        scored = zip(groups, [flight.engine for flight in taken], strict=True)
        groups = [group if one is None else one.with_older_logprobs(group, engine.version) for group, one in scored]
        stats = await engine.stats()
        self._last_stats = stats if self.goes_on else None
        if self.collector.free_cache:
            await engine.sleep_until_update()
        answers = [pair for group in groups for pair in group]
        model = self.collector.reward_model
        metrics = {} if model is None else model.metrics()
        self._last_take_ended = time.perf_counter()
        ages = [engine.version - flight.version for flight in taken]
        self.events.add("take", version=engine.version, groups=[flight.number for flight in taken], ages=ages)
        self.events.write()
        if self.admission.max_lag:
            trajectories = [answer for answer, _ in answers]
            self.counts.add_step(ages, trajectories, engine.version)
            self._step.add(ages, trajectories, self._last_take_ended - start, self.idle.seconds())
            metrics |= step_metrics(self, self._step, self._evicted)
            self._evicted = [] if len(self._step.ages) == self.admission.batch else self._evicted
        return RolloutBatch.of(
            [flight.row for flight in taken],
            answers,
            [score for _, score in answers],
            generate_s=generate_s,
            reward_s=self._last_take_ended - start - generate_s,
            engine_stats=metrics_between(stats_before, stats),
            metrics=metrics,
        )

    async def published(self, version: int, pause_s: float | None = None) -> None:
        """`version` is in use from now on: what waits goes on under it, and prompts are sent while there is room.
        `pause_s`: seconds until now in which the rollout could not sample, where they are known."""
        if self._saved is not None:
            await self._begin_again(self._saved)
        if self.collector.engine.can_park:
            await self.collector.engine.resume()
        self._publish(version, pause_s)
        self._admit()
        await self._until_sent()  # before the engine may be parked

    async def _until_sent(self) -> None:
        """New requests, and those of greedy answers, are at the engine."""
        for _ in range(2):
            await asyncio.sleep(0)

    async def publish(self, weight_sync: WeightSync, version: int) -> Receipt:
        if not self.goes_on:
            return await weight_sync.publish(version)
        engine, started = self.collector.engine, time.perf_counter()
        if engine.can_park:
            await engine.park()  # it cannot get weights beside the sampling
        receipt = await weight_sync.publish(version)
        if engine.can_park:
            receipt = replace(receipt, pause_s=time.perf_counter() - started)
        await self.published(version, receipt.pause_s)
        return receipt

    async def under_way(self) -> list[SampledSequence]:
        in_flight = {request.request_id: request for request in await self.collector.engine.in_flight()}
        for _ in range(2):  # what was complete when the engine was asked, or parked, reaches its group
            await asyncio.sleep(0)
        asked = [(flight.engine, flight.answers) for flight in self.flights.values() if flight.engine is not None]
        return [sequence for engine, answers in asked for sequence in engine.sequences(answers, in_flight)]

    def note_stages(self, spans: Sequence[StageSpan]) -> None:
        to_time = time.time() - time.perf_counter()
        stages = [[name, round(to_time + start, 6), round(seconds, 6)] for name, start, seconds in spans]
        self.events.add("stages", stages=stages)

    def _publish(self, version: int, pause_s: float | None) -> None:
        """Note the weights that are published now; groups that have become too old are dropped."""
        self._step, self._stats_before = StepTally(), self._last_stats
        self.events.add("publish", version=version, **({} if pause_s is None else {"pause_s": round(pause_s, 6)}))
        dropped = self.admission.publish(version)
        for number in dropped:
            flight = self.flights.pop(number)
            if flight.task is not None:
                flight.task.cancel()
            self.events.add("dropped", group=number, row=flight.row.index, admitted_at=flight.version)
        self.counts.add_publish(len(dropped))

    def _admit(self) -> None:
        """Send prompts while there is room."""
        for _ in range(self.admission.room):
            number = self.admission.admit()
            flight = Flight(number, self._next_row(), self.admission.version, engine=self._engine_for(number))
            self.events.add("admitted", group=number, row=flight.row.index, version=flight.version)
            self._send(flight)

    def _next_row(self) -> PromptRow:
        if not self._drawn:
            size = 1 if self.rules.replace_groups else self.rules.gen_batch_size or self.admission.batch
            self._drawn.extend(self.prompts.take(size))
        return self._drawn.popleft()

    def _send(self, flight: Flight) -> None:
        self.flights[flight.number] = flight
        if not self._is_answered(flight):
            self.idle.begin(flight.number)
        flight.task = asyncio.create_task(self._answer(flight))
        flight.task.add_done_callback(lambda _: self._done(flight.number))

    def _done(self, number: int) -> None:
        self.idle.end(number)
        self._changed.set()

    async def _answer(self, flight: Flight) -> Group:
        """The scored answers to one prompt. All that the engine has to do for them comes before any score: it may be
        parked from then on."""
        if not self._is_answered(flight):
            GroupRequests(self.events, flight.number).follow()
            async with asyncio.TaskGroup() as pair:
                if self.with_baselines and flight.greedy is None:
                    pair.create_task(self._answer_greedily(flight))
                if flight.answers is None:
                    engine = flight.engine or self.collector.engine
                    flight.answers = await self._sample(flight, self.sampling, engine)
            self._note_answers(flight)
        assert flight.answers is not None
        group = await self.collector.scored(flight.row, flight.answers)
        if flight.greedy is not None:
            scored = await self.collector.scored(flight.row, flight.greedy)
            group = with_baseline(group, mean_score([score for _, score in scored]))
        if self.rules.replace_groups and flight.number in self.admission.versions:
            self._keep_or_evict(flight, group)
        return group

    def _engine_for(self, group: int, known: Sequence[dict[str, Any]] = ()) -> PromptEngine | None:
        return PromptEngine(self.collector.engine, group, known) if self.scores_versions else None

    def _is_answered(self, flight: Flight) -> bool:
        return flight.answers is not None and (flight.greedy is not None or not self.with_baselines)

    async def _answer_greedily(self, flight: Flight) -> None:
        flight.greedy = await self._sample(flight, greedy(self.sampling), self.collector.engine)

    async def _sample(self, flight: Flight, sampling: SamplingParams, engine: RolloutEngine) -> list[Trajectory]:
        request_id = flight.number if sampling is self.sampling else -1 - flight.number
        return await self.collector.answered(flight.row, request_id, sampling, engine)

    def _note_answers(self, flight: Flight) -> None:
        self.idle.end(flight.number)
        segments = [t.segments or ((t.policy_version[0], t.num_sampled),) for t in flight.answers or ()]
        self.events.add("answered", group=flight.number, segments=segments)
        if not self.rules.replace_groups:
            self.admission.finish(flight.number)
            self._changed.set()

    def _keep_or_evict(self, flight: Flight, group: Group) -> None:
        """A group that cannot be trained on leaves, and another prompt takes its place at once."""
        self.admission.finish(flight.number)
        if reason := verdict_on(group, self.rules).reason:
            self.admission.evict(flight.number)
            del self.flights[flight.number]
            self.events.add("evicted", group=flight.number, row=flight.row.index, reason=reason)
            self._evicted.append(group)
            self._check_evictions()
            self._admit()
        self._changed.set()

    def _check_evictions(self) -> None:
        evicted, limit = len(self._evicted), self.rules.max_gen_batches
        size = self.rules.gen_batch_size or self.admission.batch
        if evicted >= (limit * size if limit else len(self.prompts)):
            raise VerlError(
                f"{evicted} groups in one step could not be trained on, because all their answers were equal "
                f"(algorithm.filter_groups.metric={self.rules.metric}) or had no reward; take prompts that are neither "
                "too hard nor too easy, raise actor_rollout_ref.rollout.n, or raise "
                "algorithm.filter_groups.max_num_gen_batches"
            )

    async def _until_ready(self, num_prompts: int) -> None:
        total = num_prompts * self.sampling.n
        while not self.admission.is_ready(num_prompts):
            counts = CollectCounts(total, min(total, self.admission.num_queued * self.sampling.n))
            self.collector.on_answers(counts)
            await self._changed.wait()
            self._changed.clear()
            self._raise_failure()

    def _raise_failure(self) -> None:
        for flight in self.flights.values():
            task = flight.task
            if task is not None and task.done() and not task.cancelled() and (error := task.exception()):
                raise first_failure(error)

    async def _scored(self, flight: Flight) -> Group:
        assert flight.task is not None
        try:
            return await flight.task
        except BaseExceptionGroup as failures:
            raise first_failure(failures) from None

    async def _begin_again(self, saved: dict[str, Any]) -> None:
        """Send what a checkpoint had under way: queued groups are scored again, unfinished answers go on."""
        self._saved, engine = None, self.collector.engine
        if engine.can_park:
            await engine.park()
        in_flight = requests_from_json(saved["engine"])
        engine.restore(in_flight)
        groups = sorted(group["group"] for group in saved["groups"])
        self.events.add("resumed", version=engine.version, groups=groups)
        rows = self.prompts.rows_of([group["row"] for group in saved["groups"]])
        for group, row in zip(saved["groups"], rows, strict=True):
            number = group["group"]
            answers, greedy = (trajectories_from_json(group[key], number, row.index) for key in ("answers", "greedy"))
            known = by_position(group.get("known_logprobs", []), answers, in_flight)
            self._send(Flight(number, row, group["version"], answers, greedy, engine=self._engine_for(number, known)))
        await self._until_sent()

    @property
    def epoch(self) -> int:
        return self.prompts.epoch

    def close(self) -> None:
        self.events.write()
        self.collector.engine.close()

    async def saved(self) -> dict[str, Any]:
        """The state of `state_dict`; an answer that the engine completes after it was asked is complete here, too."""
        requests = await self.collector.engine.in_flight()
        return self.state_dict(requests)

    def state_dict(self, in_flight: Sequence[GenerationRequest] = ()) -> dict[str, Any]:
        """The prompts that come next, what is under way with its tokens, and the order of admissions. `in_flight`: what
        the engine says about its requests."""
        self.events.write()
        if self._saved is not None:  # nothing was taken since it was loaded
            return self._saved
        return {
            "prompts": self.prompts.state_dict(),
            "drawn": [row.index for row in self._drawn],
            "admission": self.admission.state_dict(),
            "counts": self.counts.state_dict(),
            "groups": [
                {"group": f.number, "row": f.row.index, "version": f.version}
                | {"answers": trajectories_as_json(f.answers), "greedy": trajectories_as_json(f.greedy)}
                | {"known_logprobs": f.engine.known(f.answers) if f.engine else []}
                for f in self.flights.values()
            ],
            "engine": requests_as_json(in_flight),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "admission" not in state:
            raise VerlError(
                "the checkpoint is one of a synchronous run (trainer.v1.trainer_mode=sync), which has nothing under "
                "way; resume it with that mode, or start over under another trainer.experiment_name"
            )
        self.prompts.load_state_dict(state["prompts"])
        self._drawn = deque(self.prompts.rows_of(state["drawn"]))
        self.admission.load_state_dict(state["admission"])
        self.counts.load_state_dict(state["counts"])
        self._saved = state
