"""Old log-probs of tokens that older weights sampled: scored by the trainer before it gives their version up."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from verl.config import RunConfig
from verl.config.asynchronous import scores_before_leaving
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.trajectory import Trajectory
from verl.observe.timers import StageTimer
from verl.runtime.driver_loop import DriverLoop
from verl.trainer.ppo.async_source import AsyncSource, Flight
from verl.trainer.ppo.known_logprobs import SampledTokens
from verl.utils.errors import VerlError
from verl.workers.actor import Actor

BYPASS = "algorithm.rollout_correction.bypass_mode=True"


async def sequences_under_way(source: AsyncSource) -> list[tuple[Flight, SampledTokens]]:
    """All that was sampled of the groups that no step has taken, complete or not, and the group of each."""
    in_flight = {saved["request_id"]: saved for saved in await source.collector.engine.in_flight()}
    for _ in range(2):  # what was complete when the engine was asked, or parked, reaches its group
        await asyncio.sleep(0)
    out: list[tuple[Flight, SampledTokens]] = []
    for flight in source.flights.values():
        if flight.answers is not None:
            out += [(flight, SampledTokens.of_answer(answer)) for answer in flight.answers]
        elif flight.engine is not None:
            out += [(flight, sequence) for sequence in flight.engine.sequences(in_flight)]
    return out


def score_version(
    under_way: list[tuple[Flight, SampledTokens]], version: int, logprobs_of: Callable[[Batch], Tensor]
) -> int:
    """Score the tokens that `version` sampled and that were not scored yet. Returns their number."""
    new = []
    for flight, sequence in under_way:
        places = (sequence.versions == version) & np.isnan(flight.known.of(sequence))
        if places.any():
            new.append((flight, sequence, places))
    if not new:
        return 0
    batch = Batch.pack([_to_score(*part) for part in new])
    scored = logprobs_of(batch).split([len(sequence.tokens) for _, sequence, _ in new])
    for (flight, sequence, places), values in zip(new, scored, strict=True):
        flight.known.add(sequence, places, values.numpy())
    return sum(int(places.sum()) for _, _, places in new)


def _to_score(flight: Flight, sequence: SampledTokens, places: np.ndarray) -> Trajectory:
    tokens, mask = torch.from_numpy(sequence.tokens), torch.from_numpy(places)
    return Trajectory(tokens, mask, torch.zeros(len(tokens)), group_id=flight.number, reward=0.0)


def with_known_old_logprobs(batch: Batch, answers: list[Trajectory], version: int) -> Batch:
    """With a column `old_logprobs` where older versions than `version`, the published one, sampled a token; NaN where
    it is the one that did. VerlError where a token of an older version was not scored."""
    parts = []
    for answer in answers:
        versions = torch.from_numpy(SampledTokens.of_answer(answer).versions)
        known = torch.full_like(answer.rollout_logprobs, torch.nan)
        known = known if answer.older_logprobs is None else answer.older_logprobs
        if bool((missing := known.isnan() & (versions >= 0) & (versions < version)).any()):
            raise VerlError(_not_scored_message(answer, missing, versions))
        parts.append(known)
    old = torch.cat(parts)
    return batch if bool(old.isnan().all()) else batch.with_columns(old_logprobs=old)


def _not_scored_message(answer: Trajectory, missing: Tensor, versions: Tensor) -> str:
    place = int(missing.nonzero()[0])
    return (
        f"an answer to row {answer.row} has {int(missing.sum())} tokens, the first at place {place}, that version "
        f"{int(versions[place])} of the weights sampled and that the trainer did not score before it gave that version "
        "up. Either an agent loop returned other tokens before them than it had given to generate(), or a checkpoint "
        f"goes on that was trained with {BYPASS}; set {BYPASS}, or async_training.staleness_threshold=0"
    )


class VersionScoring:
    """Scores what a version of the weights has sampled, by the trainer, before it gives that version up, where the
    rollout does not record the trainer's log-probs.

    Colocated, that is before the update: everything is parked. With devices of its own the rollout samples on until
    the next version is published, so the actor keeps the weights of the published one beside those that it trains: by
    them it scores the later parts of a step, and after the publish all that they sampled and no step has taken. So what
    a step takes was sampled by the published version, or is scored.
    """

    def __init__(self, config: RunConfig, source: object, actor: Actor, loop: DriverLoop):
        self.actor, self.loop = actor, loop
        self.source = source if isinstance(source, AsyncSource) and scores_before_leaving(config) else None

    @property
    def goes_on(self) -> bool:
        """Whether the rollout samples while the policy is trained."""
        return self.source is not None and self.source.goes_on

    def before_update(self, version: int, has_moved: bool, metrics: Metrics, timer: StageTimer) -> None:
        """Call it before the policy is trained, which `has_moved` from the published `version` already or not."""
        if self.source is None or (self.goes_on and has_moved):
            return
        if not self.goes_on:
            self._score(self.source, version, self.actor.logprobs, metrics, timer)
            return
        with timer("old_log_prob"):
            metrics.mean("training/off_policy/kept_weights_bytes", self.actor.keep_weights(), 1)

    def after_publish(self, version: int, metrics: Metrics, timer: StageTimer) -> None:
        """Call it after a step has published, when nothing more is sampled by `version`, the one before."""
        if self.source is not None and self.goes_on:
            self._score(self.source, version, self._logprobs_by_kept, metrics, timer)

    def sampling_weights(self, has_moved: bool) -> AbstractContextManager[None]:
        """A context in which the actor computes by the published version, also where the policy `has_moved`."""
        return self.actor.kept_weights() if self.goes_on and has_moved else nullcontext()

    def _score(
        self,
        source: AsyncSource,
        version: int,
        logprobs_of: Callable[[Batch], Tensor],
        metrics: Metrics,
        timer: StageTimer,
    ) -> None:
        with timer("old_log_prob"):
            num_tokens = score_version(self.loop.run(sequences_under_way(source)), version, logprobs_of)
        metrics.mean("training/off_policy/tokens_scored_before_leaving", num_tokens, 1)

    def _logprobs_by_kept(self, batch: Batch) -> Tensor:
        with self.actor.kept_weights():
            return self.actor.logprobs(batch)
