"""Old log-probs, against which a loss measures its ratio: the ways to get them, of which a run has one.

The trainer calls three verbs: `fill` before the advantages, `before_update` before each update, and `after_publish`
when the step has published.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from verl.algorithms import old_logprobs as ways
from verl.config import RunConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.observe.timers import StageTimer
from verl.runtime.driver_loop import DriverLoop
from verl.trainer.ppo.batch_metrics import mismatch_metrics, off_policy_metrics, staleness_metrics
from verl.trainer.ppo.sources.prompt_engine import score_version
from verl.trainer.ppo.sources.trajectory_source import TrajectorySource
from verl.workers.actor import Actor


class OnePass:
    """One forward pass of the policy before the update gives them."""

    def __init__(self, config: RunConfig, actor: Actor):
        self.config, self.actor = config, actor
        self.outputs, self.update_gives = ways.outputs_asked_for(config), ways.update_gives_old_logprobs(config)
        self.resamples = config.algorithm.use_pf_ppo  # the update does not see every sequence
        self.logprobs: Tensor | None = None  # (T,) by the policy before the update, if it was asked
        self.version = -1  # published when a batch was filled last
        self.has_moved = False  # whether the policy had been trained since: from the second part of a step on

    def fill(self, batch: Batch, step: int, version: int, timer: StageTimer) -> Batch:
        """Adds old_logprobs and entropy, unless the update computes the same values, and what estimators ask for.
        `step` is the number of steps that are done, `version` the published one."""
        self.has_moved, self.version = version == self.version, version
        batch, old = self.find(batch, step, timer)
        return batch if old is None else batch.with_columns(old_logprobs=old)

    def find(self, batch: Batch, step: int, timer: StageTimer) -> tuple[Batch, Tensor | None]:
        """The batch, with what the policy was asked for, and its old log-probs (T,); None: the update gives them."""
        return self.with_outputs(batch, timer)

    def before_update(self, metrics: Metrics, timer: StageTimer) -> None:
        """Call it before the policy is trained on the batch that was filled last."""

    def after_publish(self, metrics: Metrics, timer: StageTimer) -> None:
        """Call it after a step has published, when nothing more is sampled by the version before."""

    def compare(self, batch: Batch, updated: Tensor) -> dict[str, float]:
        """Rollout against trainer, and version against version, where old_logprobs are not all by the policy of now;
        `updated` (T,) are the log-probs at the beginning of the update."""
        return {}

    def mismatch(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        """Rollout against trainer over a whole step; empty where `compare` has put it among the step's `metrics`."""
        recorded = self.config.actor_rollout_ref.rollout.calculate_log_probs
        return mismatch_metrics(batch, batch["old_logprobs"]) if recorded and "old_logprobs" in batch else {}

    def sampling_weights(self) -> AbstractContextManager[None]:
        """A context in which the actor computes by the published version."""
        return nullcontext()

    def with_outputs(self, batch: Batch, timer: StageTimer) -> tuple[Batch, Tensor]:
        """The batch with the policy's entropy and the outputs that are asked for, and the log-probs (T,)."""
        with timer("old_log_prob"), self.sampling_weights():
            outputs = self.actor.logprobs_and_entropy(batch, self.outputs)
        self.logprobs, batch = outputs["logprobs"], batch.with_columns(entropy=outputs["entropy"])
        if "sum_pi_squared" in outputs:
            batch = batch.with_columns(sum_pi_squared=outputs["sum_pi_squared"])
        return batch, self.logprobs

    def current(self, updated: Tensor) -> Tensor:
        """(T,) log-probs at the beginning of the update."""
        return self.logprobs if self.resamples and self.logprobs is not None else updated


class FromUpdate(OnePass):
    """The update's own forward pass gives them, wherever it has the weights that sampled."""

    def find(self, batch: Batch, step: int, timer: StageTimer) -> tuple[Batch, Tensor | None]:
        on_policy = bool((batch["policy_versions"] == self.version).all())
        return (batch, None) if on_policy and self.update_repeats(step) else super().find(batch, step, timer)

    def update_repeats(self, step: int) -> bool:
        """Whether the update begins with the forward pass that `with_outputs` would make."""
        warm = step >= self.config.trainer.critic_warmup
        return self.update_gives and warm and not self.actor.has_dropout


class Rollout(OnePass):
    """The rollout has recorded them (bypass mode): the gap between engine and trainer is part of the ratio."""

    def find(self, batch: Batch, step: int, timer: StageTimer) -> tuple[Batch, Tensor | None]:
        if self.outputs or self.resamples:
            batch, _ = self.with_outputs(batch, timer)
        return batch, batch["rollout_logprobs"]

    def compare(self, batch: Batch, updated: Tensor) -> dict[str, float]:
        return mismatch_metrics(batch, self.current(updated))

    def mismatch(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        return {}


class Recorded(FromUpdate):
    """Asynchronous training with a rollout that records the trainer's own log-probs: they are taken for answers that
    older weights sampled a token of, and for all once the trainer has trained since it published."""

    def find(self, batch: Batch, step: int, timer: StageTimer) -> tuple[Batch, Tensor | None]:
        stale, old = self.stale(batch), batch["rollout_logprobs"]
        if not bool(stale.any()):
            return super().find(batch, step, timer)
        if self.update_repeats(step):
            return batch, old
        batch, logprobs = self.with_outputs(batch, timer)
        return batch, torch.where(stale[batch.sequence_ids()], old, logprobs)

    def stale(self, batch: Batch) -> Tensor:
        """(N,) bool: the answers that are not of the policy of now alone."""
        return batch["policy_versions"][:, 0] < self.version + self.has_moved

    def compare(self, batch: Batch, updated: Tensor) -> dict[str, float]:
        if not bool(self.stale(batch).any()):
            return {}
        return off_policy_metrics(batch, self.current(updated), self.version + self.has_moved)

    def mismatch(self, batch: Batch, metrics: dict[str, float]) -> dict[str, float]:
        return {} if "training/off_policy/staleness_kl" in metrics else super().mismatch(batch, metrics)


class ScoredByVersion(FromUpdate):
    """Asynchronous training where the trainer scores what a version has sampled before it gives that version up.

    Colocated, that is before the update: everything is parked. With devices of its own the rollout samples on until
    the next version is published, so the actor keeps the weights of the published one beside those that it trains: by
    them it scores the later parts of a step, and after the publish all that they sampled and no step has taken. So what
    a step takes was sampled by the published version, or is scored.
    """

    def __init__(self, config: RunConfig, actor: Actor, source: TrajectorySource, loop: DriverLoop):
        super().__init__(config, actor)
        self.source, self.loop = source, loop

    def find(self, batch: Batch, step: int, timer: StageTimer) -> tuple[Batch, Tensor | None]:
        if "old_logprobs" not in batch:  # nothing is of older weights
            return super().find(batch, step, timer)
        old, (batch, logprobs) = batch["old_logprobs"], self.with_outputs(batch, timer)
        return batch, torch.where(old.isnan(), logprobs, old)

    def before_update(self, metrics: Metrics, timer: StageTimer) -> None:
        if not self.source.goes_on:
            self._score(metrics, timer)
        elif not self.has_moved:
            with timer("old_log_prob"):
                metrics.mean("training/off_policy/kept_weights_bytes", self.actor.keep_weights(), 1)

    def after_publish(self, metrics: Metrics, timer: StageTimer) -> None:
        if self.source.goes_on:
            self._score(metrics, timer)

    def compare(self, batch: Batch, updated: Tensor) -> dict[str, float]:
        return staleness_metrics(batch, self.current(updated), self.version + self.has_moved)

    def sampling_weights(self) -> AbstractContextManager[None]:
        return self._kept_weights() if self.has_moved else nullcontext()

    def _kept_weights(self) -> AbstractContextManager[None]:
        return self.actor.kept_weights() if self.source.goes_on else nullcontext()

    def _score(self, metrics: Metrics, timer: StageTimer) -> None:
        with timer("old_log_prob"):
            under_way = self.loop.run(self.source.under_way())
            with self._kept_weights():
                num_tokens = score_version(under_way, self.version, self.actor.logprobs)
        metrics.mean("training/off_policy/tokens_scored_before_leaving", num_tokens, 1)


def old_logprobs(way: str, config: RunConfig, actor: Actor, source: TrajectorySource, loop: DriverLoop) -> OnePass:
    """The strategy for this `way` of `old_logprobs_of`."""
    if way == ways.SCORED:
        return ScoredByVersion(config, actor, source, loop)
    simple = {ways.FROM_UPDATE: FromUpdate, ways.ONE_PASS: OnePass, ways.RECORDED: Recorded, ways.ROLLOUT: Rollout}
    return simple[way](config, actor)
