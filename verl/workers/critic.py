"""The value model on the driver."""

from typing import Any

from torch import Tensor

from verl.algorithms.losses import make_value_loss
from verl.algorithms.value_normalization import ReturnScale
from verl.config import RunConfig
from verl.config.actor import FORWARD_BATCHING_KEYS, PPO_BATCHING_KEYS
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.runtime.group import WorkerGroup
from verl.utils.errors import ConfigError
from verl.workers.actor import with_schedule_length
from verl.workers.batch_dispatch import OnSequences, ShardDispatcher, ignore
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_worker import EngineWorker, MiniBatches, micro_batching, with_loss_weights


class Critic:
    """Values and updates of the value model over a worker group."""

    def __init__(self, config: RunConfig, group: WorkerGroup, on_sequences: OnSequences = ignore):
        self.config, self.group = config, group
        critic = config.critic
        shared = config.actor_rollout_ref.actor.use_prefix_grouper and "auto"  # its layers are its own
        self.dispatcher = ShardDispatcher(group, config.trainer.balance_batch, shared, "values", on_sequences)
        self.mini_batches = MiniBatches(
            critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle, critic.data_loader_seed
        )
        self.scale = ReturnScale() if critic.normalize_values else None
        ranks_per_sequence = critic.engine.ranks_per_sequence
        self.train_micro = micro_batching(critic, PPO_BATCHING_KEYS, ranks_per_sequence)
        self.infer_micro = micro_batching(critic, FORWARD_BATCHING_KEYS, ranks_per_sequence)

    def values(self, batch: Batch) -> Tensor:
        """(T,) value of the state before each sampled token, 0 elsewhere."""
        inputs = batch.select_columns(())
        values = self.dispatcher.forward(inputs, ("values",), self.infer_micro, 1.0)["values"]
        return values if self.scale is None else self.scale.restore(values, batch)

    def update(self, batch: Batch, step: int) -> Metrics:
        """Run all optimiser steps on one batch; return metrics."""
        critic, metrics = self.config.critic, Metrics()
        if self.scale is not None:
            batch = self.scale.update_and_normalize(batch)
            metrics.mean("return_scale/mean", self.scale.mean, 1)
            metrics.mean("return_scale/deviation", self.scale.deviation, 1)
        self.dispatcher.begin_update(batch.num_sequences * critic.ppo_epochs)
        for _, mini in self.mini_batches.split(batch, step):
            mini = with_loss_weights(
                mini, critic.loss_agg_mode, critic.loss_scale_factor or self.config.data.max_response_length
            )
            update_metrics, _ = self.dispatcher.update(mini, self.train_micro, 1.0)
            metrics.merge(update_metrics)
        self.group.broadcast("advance_schedule")
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """The scale of the returns, which belongs to the weights; empty without one."""
        return {} if self.scale is None else {"return_scale": self.scale.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the scale of a checkpoint; from a checkpoint without one, the scale begins at 0 and 1."""
        saved = state.get("return_scale")
        if self.scale is not None and saved is not None:
            self.scale.load_state_dict(saved)
        elif saved is not None:
            raise ConfigError(
                "critic.normalize_values=False, but the critic of this checkpoint predicts normalised returns: its "
                "values would be wrong; set critic.normalize_values=True"
            )


def build_critic_worker(config: RunConfig, total_steps: int) -> EngineWorker:
    """This rank's worker of the value model."""
    critic = config.critic
    optim = with_schedule_length(critic.optim, total_steps)
    engine = EngineRegistry.new("value_model", critic.strategy, critic.model, critic.engine, optim, critic.checkpoint)
    return EngineWorker(engine, make_value_loss(critic))
