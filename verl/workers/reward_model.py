"""A reward model on the trainer's ranks, or on ranks of its own: one score for each sequence."""

from collections.abc import Sequence

import torch

from verl.config import HFModelConfig, RunConfig
from verl.config.actor import FORWARD_BATCHING_KEYS
from verl.data.batch import Batch
from verl.data.preferences import with_score_position
from verl.data.trajectory import Trajectory
from verl.models.attention.prefix_sharing import shared_beginnings
from verl.runtime.group import WorkerGroup
from verl.workers.batch_dispatch import ShardDispatcher
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_worker import EngineWorker, micro_batching


class RewardModel:
    """Scores of whole sequences over a worker group; they depend on neither the micro-batches nor the ranks."""

    def __init__(self, config: RunConfig, group: WorkerGroup):
        settings, shared = config.reward.reward_model, config.actor_rollout_ref.actor.use_prefix_grouper and "auto"
        self.dispatcher = ShardDispatcher(group, config.trainer.balance_batch, shared, "values")
        self.micro = micro_batching(settings, FORWARD_BATCHING_KEYS, settings.engine.ranks_per_sequence)
        self.is_here = group.local_worker is not None

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The output of the head at the last token of each sequence of token ids."""
        begin = shared_beginnings(sequences) if self.dispatcher.share_prompts else [0] * len(sequences)
        batch = Batch.pack([_with_end(number, ids, begin[number]) for number, ids in enumerate(sequences)])
        values = self.dispatcher.forward(batch.select_columns(()), ("values",), self.micro, 1.0)["values"]
        return values[batch.cu_seqlens[1:] - 1].tolist()


def _with_end(number: int, ids: Sequence[int], beginning: int) -> Trajectory:
    """The sequence, of which the first `beginning` tokens are its prompt: others may have the same."""
    nothing = torch.zeros(len(ids))
    whole = with_score_position(Trajectory(torch.tensor(ids), nothing.bool(), nothing, group_id=number), None)
    if beginning:
        whole.loss_mask[beginning:] = True  # the head's values there cost next to nothing
    return whole


def model_of_scores(config: RunConfig) -> HFModelConfig:
    """The reward model's folder as the engine's model."""
    return HFModelConfig(path=config.reward.reward_model.model_path)


def build_reward_model_worker(config: RunConfig) -> EngineWorker:
    """A forward-only worker on the reward model's weights."""
    settings = config.reward.reward_model
    return EngineWorker(EngineRegistry.new("reward_model", settings.strategy, model_of_scores(config), settings.engine))
