"""All that one rank holds: the engines of actor, reference and critic, and its part of the rollout."""

import torch

from verl.config import RunConfig
from verl.config.base import record_reads, recorded_reads
from verl.config.check import uses_critic, uses_reference
from verl.workers.actor import build_actor_worker
from verl.workers.critic import build_critic_worker
from verl.workers.rank_rollout import RankRollout
from verl.workers.reference import build_reference_worker


class RankWorkers:
    """The workers of one rank, built in the same order everywhere: building is a collective."""

    def __init__(self, config: RunConfig, total_steps: int):
        torch.manual_seed(config.actor_rollout_ref.actor.fsdp_config.seed)
        self.actor = build_actor_worker(config, total_steps)
        self.reference = build_reference_worker(config, self.actor) if uses_reference(config) else None
        self.critic = build_critic_worker(config, total_steps) if uses_critic(config) else None
        arr = config.actor_rollout_ref
        self.rollout = RankRollout(arr.rollout, arr.model, self.actor.engine)

    def config_keys_read(self) -> list[tuple[str, str]]:
        """The configuration keys that this process has read."""
        return sorted(recorded_reads())


def build_rank_workers(config: RunConfig, total_steps: int) -> RankWorkers:
    """`RankWorkers` where nothing else has recorded which keys are read."""
    record_reads(True)
    return RankWorkers(config, total_steps)
