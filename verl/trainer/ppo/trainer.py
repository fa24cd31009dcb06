"""The step: collect, pack, evaluate, compute advantages, update, publish.

Synchronous and asynchronous training use the same step with different sources. Dumps, logging and checkpoints are in
training_run.py.
"""

from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from verl.algorithms.advantages import compute_advantages, get_advantage, with_token_rewards
from verl.algorithms.kl import apply_kl_in_reward, get_kl_controller
from verl.algorithms.losses import aggregation_mode
from verl.algorithms.policy_filtration import resample_by_score
from verl.algorithms.rollout_correction import correct
from verl.config import RunConfig
from verl.config.check import trained_actor
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.random_streams import sequence_draws
from verl.data.reward_parts import with_reward_columns
from verl.observe.timers import StageTimer
from verl.rewards.base import Reward
from verl.rewards.canary import Canary
from verl.rewards.scoring_pool import end_scoring_processes
from verl.runtime.driver_loop import DriverLoop
from verl.runtime.pools import WorkerPools
from verl.trainer.ppo.batch_metrics import (
    balance_metrics,
    data_metrics,
    entropy_metrics,
    mean_max_min,
    reward_part_metrics,
    turn_metrics,
    variance_proxy_metrics,
)
from verl.trainer.ppo.facts import RunFacts
from verl.trainer.ppo.old_logprobs import old_logprobs
from verl.trainer.ppo.sources.trajectory_source import RolloutBatch, TrajectorySource
from verl.utils.errors import DataError, RewardError, VerlError
from verl.weight_sync.base import Receipt, WeightSync
from verl.workers.actor import Actor, all_rejected_message
from verl.workers.critic import Critic
from verl.workers.reference import Reference
from verl.workers.teacher import Teachers

Result = TypeVar("Result")


@dataclass
class StepRecord:
    """Data and results of one step, for logging."""

    step: int
    epoch: int
    rollouts: RolloutBatch
    batch: Batch
    trained: Batch  # what the update saw: `batch`, unless algorithm.use_pf_ppo drew its sequences again
    metrics: dict[str, float]
    receipt: Receipt


@dataclass
class TrainedPart:
    """Data and results of a step before it is published, or of a part of it."""

    rollouts: RolloutBatch
    batch: Batch
    trained: Batch
    metrics: Metrics
    tokens_per_rank: np.ndarray  # that each rank was trained on


def joined(parts: Sequence[TrainedPart]) -> TrainedPart:
    """The parts of a step as one."""
    if len(parts) == 1:
        return parts[0]
    metrics = Metrics()
    for part in parts:
        metrics.merge(part.metrics)
    return TrainedPart(
        RolloutBatch.cat([part.rollouts for part in parts]),
        Batch.cat([part.batch for part in parts]),
        Batch.cat([part.trained for part in parts]),
        metrics,
        np.sum([part.tokens_per_rank for part in parts], axis=0),
    )


class Models(NamedTuple):
    """The models of a step."""

    actor: Actor
    reference: Reference | None = None
    critic: Critic | None = None
    teachers: Teachers | None = None


class RunReward(NamedTuple):
    """The reward of a run, its canary, if it has one, and what closes its servers with the trainer."""

    reward: Reward
    canary: Canary | None
    servers: ExitStack


class PPOTrainer:
    """Trains `actor` (and `critic`) on what `source` collects. `version` counts published weights."""

    def __init__(
        self,
        config: RunConfig,
        facts: RunFacts,
        source: TrajectorySource,
        models: Models,
        weight_sync: WeightSync,
        pools: WorkerPools,
        reward: RunReward,
    ):
        self.config, self.source, self.weight_sync = config, source, weight_sync
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.actor, self.reference, self.critic, self.teachers = models
        self.pools = pools  # closed with the trainer
        self.reward, self.canary, self.reward_servers = reward
        self.num_parts = facts.num_parts  # in which a step takes its trajectories
        self.global_step = 0
        self.first_step = 1  # of this process
        self.version = -1
        self.loop = DriverLoop("rollout")
        self.old_logprobs = old_logprobs(facts.old_logprobs, config, self.actor, source, self.loop)

    def step(self, timer: StageTimer) -> StepRecord:
        """One step on fresh trajectories; afterwards the rollout engine samples from the updated weights."""
        parts = []
        for left in reversed(range(self.num_parts)):
            parts.append(self.train_on(self.collect(timer), timer, is_last=left == 0))
        part = joined(parts)
        self.global_step += 1
        with timer("update_weights"):
            receipt = self.publish()
        self.old_logprobs.after_publish(part.metrics, timer)
        metrics = self.step_metrics(part) | receipt.metrics()
        return StepRecord(
            self.global_step, self.source.epoch, part.rollouts, part.batch, part.trained, metrics, receipt
        )

    def train_on(self, rollouts: RolloutBatch, timer: StageTimer, is_last: bool) -> TrainedPart:
        """Evaluates the trajectories of a step, or of a part of it, and updates the policy by them."""
        batch = self.evaluate(self.pack(rollouts), timer)
        with timer("adv"):
            batch, metrics = self.compute_advantages(batch)
            trained = self.resample(batch, metrics)
        self.old_logprobs.before_update(metrics, timer)
        batch, update_metrics = self.update(batch, trained, timer, is_last)
        metrics.merge(update_metrics)
        return TrainedPart(rollouts, batch, trained, metrics, self.actor.dispatcher.tokens_per_rank.copy())

    def collect(self, timer: StageTimer) -> RolloutBatch:
        """Scored trajectories of the next prompts."""
        take = partial(self.source.take, self.config.data.train_batch_size // self.num_parts)
        with timer.slice("collect"):
            rollouts = self.wait_for(self.canary.beside(take, self.global_step + 1) if self.canary else take())
            timer.add("gen", rollouts.generate_s)
            timer.add("reward", rollouts.reward_s)
        if all(t.reward is None for t in rollouts.trajectories):
            errors = sorted({s.error for s in rollouts.scores if s.error})
            raise RewardError(
                f"step {self.global_step + 1}: none of {len(rollouts.trajectories)} answers got a reward "
                f"({rollouts.num_reward_errors} errors, {rollouts.num_abstained} abstentions); there is nothing to "
                f"train on. First error: {errors[0] if errors else 'none'}"
            )
        return rollouts

    def pack(self, rollouts: RolloutBatch) -> Batch:
        """The answers that have a reward, with the columns of rewards that the advantage estimator asks for, and what
        is known of old_logprobs where older weights sampled a token; NaN elsewhere."""
        algorithm = self.config.algorithm
        scored = [t for t in rollouts.trajectories if t.reward is not None]
        batch, older = Batch.pack(scored), [t.older_logprobs for t in scored if t.older_logprobs is not None]
        if older and not bool((old := torch.cat(older)).isnan().all()):
            batch = batch.with_columns(old_logprobs=old)
        return with_reward_columns(batch, scored, get_advantage(algorithm.adv_estimator).columns_for(algorithm))

    def evaluate(self, batch: Batch, timer: StageTimer) -> Batch:
        """Adds old_logprobs, entropy and what the advantage estimator asks for, ref_logprobs, teachers' and values.

        The first two are left out where the update computes the same values.
        """
        batch = self.old_logprobs.fill(batch, self.global_step, self.version, timer)
        if self.reference is not None:
            with timer("ref"):
                batch = batch.with_columns(ref_logprobs=self.reference.logprobs(batch))
        if self.teachers is not None:
            with timer("teacher"):
                batch = self.teachers.annotate(batch)
        if self.critic is not None:
            with timer("values"):
                batch = batch.with_columns(values=self.critic.values(batch))
        return batch

    def compute_advantages(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Adds token_rewards, advantages and returns, and corrects the batch before, if asked for."""
        algorithm = self.config.algorithm
        batch, metrics = self.correct(batch)
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_in_reward(batch, self.kl_controller, algorithm.kl_penalty)
            metrics.merge(kl_metrics)
        else:
            batch = with_token_rewards(batch)
        return compute_advantages(batch, algorithm), metrics

    def correct(self, batch: Batch) -> tuple[Batch, Metrics]:
        """Rollout correction by old_logprobs; in bypass mode the actor does it, mini-batch by mini-batch."""
        correction = self.config.algorithm.rollout_correction
        if correction.bypass_mode or not correction.corrects:
            return batch, Metrics()
        batch, metrics = correct(batch, batch["old_logprobs"], correction)
        if not batch["loss_mask"].any():
            raise DataError(all_rejected_message(correction, self.global_step + 1))
        return batch, metrics

    def resample(self, batch: Batch, metrics: Metrics) -> Batch:
        """The sequences to train on: `batch`, drawn again with algorithm.use_pf_ppo; adds how many are different."""
        if not self.config.algorithm.use_pf_ppo:
            return batch
        seed = self.config.actor_rollout_ref.actor.data_loader_seed
        draws = sequence_draws(seed, self.global_step, batch.num_sequences)
        trained, resample_metrics = resample_by_score(batch, self.config.algorithm.pf_ppo, draws)
        metrics.merge(resample_metrics)
        return trained

    def update(self, batch: Batch, trained: Batch, timer: StageTimer, is_last: bool = True) -> tuple[Batch, Metrics]:
        """Updates the critic, then (after its warm-up) the actor by `trained`, the `is_last` part of the step; fills
        old_logprobs and entropy of `batch`, if left out.

        Rejected tokens are in `loss_mask` again afterwards.
        """
        metrics = Metrics()
        if self.critic is not None:
            with timer("update_critic"):
                metrics.merge(self.critic.update(trained, self.global_step).with_prefix("critic/"))
        if self.global_step >= self.config.trainer.critic_warmup:
            with timer("update_actor"):
                update_metrics, outputs = self.actor.update(trained, self.global_step, is_last)
                metrics.merge(update_metrics.with_prefix("actor/", unless="distillation/"))
                metrics.merge(self.actor.correction_metrics)
            for name, value in self.old_logprobs.compare(batch, outputs["logprobs"]).items():
                metrics.mean(name, value, 1)
            if "old_logprobs" not in batch:
                batch = batch.with_columns(old_logprobs=outputs["logprobs"])
            if "entropy" not in batch and "entropy" in outputs:
                batch = batch.with_columns(entropy=outputs["entropy"])
        return batch.with_columns(loss_mask=batch.sampled_mask()), metrics

    def wait_for(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """The result of `coroutine` on the event loop of rollout, rewards and publishing."""
        return self.loop.run(coroutine)

    def publish(self) -> Receipt:
        """Makes the rollout engine sample from the trainer's weights as the next version."""
        self.version += 1
        return self.wait_for(self.source.publish(self.weight_sync, self.version))

    def step_metrics(self, part: TrainedPart) -> dict[str, float]:
        """Every metric of the step except timings; VerlError where a loss is not finite."""
        config, actor = self.config, trained_actor(self.config)
        batch, trained, rollouts = part.batch, part.trained, part.rollouts
        out = part.metrics.values()
        out.update(data_metrics(batch, config.data.max_prompt_length, config.data.max_response_length))
        tokens_per_rank = part.tokens_per_rank / actor.ppo_epochs
        out.update(
            entropy_metrics(batch, aggregation_mode(actor), actor.loss_scale_factor or config.data.max_response_length)
        )
        out.update(balance_metrics(trained.lengths.tolist(), tokens_per_rank.tolist()))
        out.update(turn_metrics(rollouts.trajectories))
        out.update(reward_part_metrics(rollouts.trajectories))
        out.update(self.old_logprobs.mismatch(batch, out))
        if "sum_pi_squared" in batch:
            out.update(variance_proxy_metrics(trained, out.get("actor/grad_norm")))
        out.update({f"rollout/{name}": value for name, value in rollouts.engine_stats.items()} | rollouts.metrics)
        versions = batch["policy_versions"].double()
        out.update(mean_max_min("training/off_policy/trajectory_staleness", self.version - 1 - versions[:, 0]))
        out.update(self.canary.metrics if self.canary else {})
        out["reward/errors"], out["reward/abstained"] = rollouts.num_reward_errors, rollouts.num_abstained
        out["reward/retries"] = rollouts.num_reward_retries
        out["reward/processes_lost"] = rollouts.num_reward_processes_lost
        out["training/global_step"], out["training/epoch"] = self.global_step, self.source.epoch
        unhealthy = [
            name for name, value in out.items() if name.endswith("_loss") and not torch.isfinite(torch.tensor(value))
        ]
        if unhealthy:
            raise VerlError(
                f"step {self.global_step}: {', '.join(unhealthy)} is not finite; see the ledger of this step"
            )
        return out

    def state_dict(self) -> dict[str, Any]:
        """The state of a resumed run besides the engines' own checkpoints; JSON values only."""
        critic = self.critic.state_dict() if self.critic is not None else {}
        return {
            "global_step": self.global_step,
            "version": self.version,
            "source": self.wait_for(self.source.saved()),
            "kl_controller": self.kl_controller.state_dict(),
            **({"critic": critic} if critic else {}),
            **({"canary": self.canary.state_dict()} if self.canary else {}),
            "reward_generators": self.wait_for(self.reward.exchange_generators(None)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken; the caller then publishes its version once more."""
        self.global_step = state["global_step"]
        self.first_step, self.version = self.global_step + 1, state["version"] - 1
        self.source.load_state_dict(state["source"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        if self.critic is not None:
            self.critic.load_state_dict(state.get("critic", {}))
        if self.canary is not None:
            self.canary.load_state_dict(state.get("canary", {}))
        if state.get("reward_generators") is not None:
            self.wait_for(self.reward.exchange_generators(state["reward_generators"]))

    def close(self) -> None:
        """End what still generates, then the rollout engine, the servers of a reward model and the ranks."""
        with ExitStack() as ending:  # the last first, each also where one before it fails
            ending.callback(end_scoring_processes)
            ending.callback(self.pools.close)
            ending.callback(self.reward_servers.close)
            ending.callback(self.source.close)
            ending.callback(self.loop.close)
