"""A reward model on the trainer's ranks, or on ranks of its own: one score for each sequence."""

from collections.abc import Sequence

import torch

from verl.config import HFModelConfig, RunConfig
from verl.config.actor import FORWARD_BATCHING_KEYS
from verl.data.batch import Batch
from verl.data.preferences import with_score_position
from verl.data.trajectory import Trajectory
from verl.runtime.group import WorkerGroup
from verl.workers.batch_dispatch import ShardDispatcher
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_worker import EngineWorker, micro_batching


class RewardModel:
    """Scores of whole sequences over a worker group; they depend on neither the micro-batches nor the ranks."""

    def __init__(self, config: RunConfig, group: WorkerGroup):
        self.dispatcher = ShardDispatcher(group, config.trainer.balance_batch)
        settings = config.reward.reward_model
        self.micro = micro_batching(settings, FORWARD_BATCHING_KEYS, settings.engine.ranks_per_sequence)
        self.is_here = group.local_worker is not None

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The output of the head at the last token of each sequence of token ids."""
        batch = Batch.pack([_with_end(number, ids) for number, ids in enumerate(sequences)])
        values = self.dispatcher.forward(batch.select_columns(()), ("values",), self.micro, 1.0)["values"]
        return values[batch.cu_seqlens[1:] - 1].tolist()


def _with_end(number: int, ids: Sequence[int]) -> Trajectory:
    nothing = torch.zeros(len(ids))
    return with_score_position(Trajectory(torch.tensor(ids), nothing.bool(), nothing, group_id=number), None)


def model_of_scores(config: RunConfig) -> HFModelConfig:
    """The reward model's folder as the engine's model."""
    return HFModelConfig(path=config.reward.reward_model.model_path)


def build_reward_model_worker(config: RunConfig) -> EngineWorker:
    """A forward-only worker on the reward model's weights."""
    settings = config.reward.reward_model
    return EngineWorker(EngineRegistry.new("reward_model", settings.strategy, model_of_scores(config), settings.engine))
