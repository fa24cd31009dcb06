"""The policy on the driver."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from verl.algorithms.losses import aggregation_mode, get_policy_loss, make_actor_loss, with_chosen_tokens
from verl.algorithms.old_logprobs import update_gives_old_logprobs
from verl.algorithms.rollout_correction import correct
from verl.config import FSDPOptimizerConfig, RolloutCorrectionConfig, RunConfig
from verl.config.actor import LOG_PROB_BATCHING_KEYS, PPO_BATCHING_KEYS
from verl.config.check import trained_actor
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.random_streams import token_draws
from verl.runtime.group import WorkerGroup
from verl.utils.errors import DataError
from verl.workers.batch_dispatch import OnSequences, ShardDispatcher, ignore
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_worker import EngineWorker, MiniBatches, micro_batching, with_loss_weights


class Actor:
    """Log-probs and updates of the policy over a worker group."""

    def __init__(self, config: RunConfig, group: WorkerGroup, on_sequences: OnSequences = ignore):
        self.config, self.group = config, group
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        shared, balanced = actor.use_prefix_grouper, config.trainer.balance_batch
        self.dispatcher = ShardDispatcher(group, balanced, shared, on_sequences=on_sequences)
        self.temperature = rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0
        self.mini_batches = MiniBatches(
            actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, actor.data_loader_seed
        )
        ranks_per_sequence = actor.engine.ranks_per_sequence
        self.train_micro = micro_batching(actor, PPO_BATCHING_KEYS, ranks_per_sequence)
        self.infer_micro = micro_batching(rollout, LOG_PROB_BATCHING_KEYS, ranks_per_sequence)
        self.correction_metrics = Metrics()  # of the last update in bypass mode

    @property
    def model(self) -> nn.Module:
        """The policy's module; only when the worker runs in this process."""
        return self.group.local_worker.engine.model

    @property
    def has_dropout(self) -> bool:
        """Whether two forward passes in training mode can differ."""
        return self.dispatcher.has_dropout

    @property
    def can_cast(self) -> bool:
        """Whether `logprobs` can be computed in another dtype than the trainer's: not with sharded parameters."""
        return self.dispatcher.can_cast

    def logprobs(self, batch: Batch, temperature: float | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """(T,) log-probs of sampled tokens at `temperature` (default: the sampling temperature), 0 elsewhere.

        With `dtype`, the weights are cast to it and run in it (in a wider one if the trainer computes in it already).
        """
        inputs = batch.select_columns(())
        temperature = self.temperature if temperature is None else temperature
        return self.dispatcher.forward(inputs, ("logprobs",), self.infer_micro, temperature, dtype)["logprobs"]

    def logprobs_and_entropy(self, batch: Batch, more: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """`logprobs`, `entropy` and `more` outputs (T,) of sampled tokens, at the sampling temperature, 0 elsewhere."""
        inputs, names = batch.select_columns(()), ("logprobs", "entropy", *more)
        return self.dispatcher.forward(inputs, names, self.infer_micro, self.temperature)

    def keep_weights(self) -> int:
        """Keep the weights of now in host memory, for `kept_weights`; bytes on all ranks."""
        return sum(self.group.broadcast("keep_weights"))

    @contextmanager
    def kept_weights(self) -> Iterator[None]:
        """A context in which forward passes compute by the weights that were kept; nothing is trained in it."""
        self.group.broadcast("swap_weights")
        try:
            yield
        finally:
            self.group.broadcast("swap_weights")

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) of every parameter, tied ones once; only when the worker runs in this process."""
        return self.group.local_worker.engine.export_weights()

    def export_adapters(self, with_base: bool) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) as `BaseEngine.export_adapters` has them; only when the worker runs in this process."""
        return self.group.local_worker.engine.export_adapters(with_base)

    def update(self, batch: Batch, step: int, is_last: bool = True) -> tuple[Metrics, dict[str, Tensor]]:
        """Run all optimiser steps on one batch; return metrics, and (T,) outputs of each token's first forward pass.

        With `is_last`, the learning rate goes on: no other part of the training step comes.
        The outputs are `logprobs`, and `entropy` where the loss names it. Without a column `old_logprobs` the loss
        treats the current policy as the sampling policy. A mini-batch whose tokens are all rejected makes no step;
        DataError if there is no other.
        """
        actor, metrics = trained_actor(self.config), Metrics()
        self.correction_metrics = Metrics()
        first: dict[str, Tensor] = {}
        tokens_seen = updates = 0
        indexed = batch.with_columns(token_indices=torch.arange(batch.num_tokens))
        self.dispatcher.begin_update(batch.num_sequences * actor.ppo_epochs)
        mode, scale = aggregation_mode(actor), actor.loss_scale_factor or self.config.data.max_response_length
        for _, mini in self.mini_batches.split(indexed, step):
            mini, before = self.with_correction(mini)
            outputs: dict[str, Tensor] = {}
            if mini["loss_mask"].any():
                mini = with_loss_weights(
                    self.with_chosen_tokens(mini, batch, step, is_first=tokens_seen == 0), mode, scale
                )
                update_metrics, outputs = self.dispatcher.update(mini, self.train_micro, self.temperature)
                metrics.merge(update_metrics)
                updates += 1
            outputs |= before  # which has rejected tokens, too
            for name, column in outputs.items() if tokens_seen < batch.num_tokens else ():  # the first epoch
                first.setdefault(name, torch.zeros(batch.num_tokens))[mini["token_indices"]] = column.float()
            tokens_seen += mini.num_tokens
        if is_last:
            self.group.broadcast("advance_schedule")
        if not updates:
            raise DataError(all_rejected_message(self.config.algorithm.rollout_correction, step + 1))
        return metrics, first

    def with_correction(self, mini: Batch) -> tuple[Batch, dict[str, Tensor]]:
        """The mini-batch, in bypass mode corrected by the policy at its beginning, if asked for; and the outputs (T,)
        of that policy. Adds to `correction_metrics`."""
        correction = self.config.algorithm.rollout_correction
        if not (correction.bypass_mode and correction.corrects):
            return mini, {}
        outputs = self.logprobs_and_entropy(mini)
        mini, metrics = correct(mini, outputs["logprobs"], correction)
        self.correction_metrics.merge(metrics)
        return mini, outputs

    def with_chosen_tokens(self, mini: Batch, step_batch: Batch, step: int, is_first: bool) -> Batch:
        """The mini-batch with the tokens that its loss chooses by the current log-probs of all of it, if it does.

        The draws depend on the seed, the step, and the token's sequence and position in the step's batch only.
        """
        actor = trained_actor(self.config)
        if get_policy_loss(actor.policy_loss.loss_mode).choose_tokens is None:
            return mini
        unchanged = is_first and "old_logprobs" in mini
        mini = mini.with_columns(current_logprobs=mini["old_logprobs"] if unchanged else self.logprobs(mini))
        draws = token_draws(actor.data_loader_seed, step, step_batch.sequence_ids(), step_batch.position_ids())
        return with_chosen_tokens(mini, actor, draws[mini["token_indices"]])


def build_actor_worker(config: RunConfig, total_steps: int) -> EngineWorker:
    """This rank's worker of the policy; its learning-rate schedule spans the run's training steps."""
    arr = config.actor_rollout_ref
    optim = with_schedule_length(arr.actor.optim, total_steps)
    engine = EngineRegistry.new(
        "language_model", arr.actor.strategy, arr.model, arr.actor.engine, optim, arr.actor.checkpoint
    )
    # no other pass of the policy may give the entropy; after the import of external_lib, which may register a loss
    alone = config.algorithm.rollout_correction.bypass_mode or update_gives_old_logprobs(config)
    loss = make_actor_loss(trained_actor(config), alone, config.algorithm.rollout_correction, config.distillation)
    return EngineWorker(engine, loss)


def all_rejected_message(correction: RolloutCorrectionConfig, step: int) -> str:
    """The error of a step without a token that rollout correction accepts."""
    return (
        f"step {step}: algorithm.rollout_correction.rollout_rs={correction.rollout_rs} rejects every sampled token, so "
        f"there is nothing to train on; widen rollout_rs_threshold={correction.rollout_rs_threshold}, or find out why "
        "rollout and trainer disagree (training/rollout_probs_diff_mean, rollout_corr/k3_kl)"
    )


def with_schedule_length(optim: FSDPOptimizerConfig, total_steps: int) -> FSDPOptimizerConfig:
    """`optim` with `total_training_steps` set to `total_steps`, unless it is set already."""
    return optim if optim.total_training_steps > 0 else dataclasses.replace(optim, total_training_steps=total_steps)
