"""The value model, as the driver sees it."""

from pathlib import Path

from torch import Tensor

from verl.algorithms.losses import make_value_loss
from verl.config import RunConfig
from verl.config.actor import FORWARD, PPO
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.runtime.group import WorkerGroup
from verl.workers.actor import schedule_over
from verl.workers.dispatch import Dispatch
from verl.workers.engine.base import EngineRegistry
from verl.workers.training import EngineWorker, MiniBatches, micro_batching, weighted


class Critic:
    """Values and updates of the value model over a worker group."""

    def __init__(self, config: RunConfig, group: WorkerGroup):
        self.config, self.group = config, group
        self.ranks = Dispatch(group, config.trainer.balance_batch)
        critic = config.critic
        self.mini_batches = MiniBatches(
            critic.ppo_mini_batch_size, critic.ppo_epochs, critic.shuffle, critic.data_loader_seed
        )
        shared = critic.fsdp.ulysses_sequence_parallel_size  # by so many ranks is each micro-batch
        self.train_micro = micro_batching(critic, PPO, shared)
        self.infer_micro = micro_batching(critic, FORWARD, shared)

    def values(self, batch: Batch) -> Tensor:
        """(T,) value of the state before each sampled token, 0 elsewhere."""
        shard = batch.keep(["rows"])
        return self.ranks.forward(shard, ("values",), self.infer_micro, 1.0)["values"]

    def update(self, batch: Batch, step: int) -> Metrics:
        """All optimiser steps on one batch."""
        critic, metrics = self.config.critic, Metrics()
        for _, mini in self.mini_batches.cut(batch, step):
            mini = weighted(
                mini, critic.loss_agg_mode, critic.loss_scale_factor or self.config.data.max_response_length
            )
            learnt, _ = self.ranks.update(mini, self.train_micro, 1.0)
            metrics.merge(learnt)
        self.group.broadcast("advance_schedule")
        return metrics

    def save(self, folder: Path) -> None:
        """Write what `checkpoint.save_contents` asks for."""
        self.group.broadcast("save", folder, list(self.config.critic.checkpoint.save_contents))

    def finish_save(self, wait: bool = True) -> bool:
        """Whether no save is under way any more (`checkpoint.async_save`); raises what went wrong in one."""
        return all(self.group.broadcast("finish_save", wait))

    def load(self, folder: Path) -> None:
        """Restore what `checkpoint.load_contents` asks for."""
        self.group.broadcast("load", folder, list(self.config.critic.checkpoint.load_contents))


def critic_worker(config: RunConfig, total_steps: int) -> EngineWorker:
    """The value model on this rank."""
    critic = config.critic
    optim = schedule_over(critic.optim, total_steps)
    engine_class = EngineRegistry.get_engine_cls("value_model", critic.strategy)
    engine = engine_class(critic.model, critic.fsdp, optim, critic.checkpoint)
    return EngineWorker(engine, make_value_loss(critic))
