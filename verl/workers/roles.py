"""All that one rank holds: the engines of actor, reference and critic, and its part of the rollout."""

import torch

from verl.config import RunConfig
from verl.config.base import record_reads, recorded_reads
from verl.config.check import uses_critic, uses_reference
from verl.workers.actor import actor_worker
from verl.workers.critic import critic_worker
from verl.workers.rank_rollout import RankRollout
from verl.workers.reference import reference_worker


class Roles:
    """The workers of one rank, built in the same order everywhere: building is a collective."""

    def __init__(self, config: RunConfig, total_steps: int):
        torch.manual_seed(config.actor_rollout_ref.actor.fsdp_config.seed)
        self.actor = actor_worker(config, total_steps)
        self.reference = reference_worker(config, self.actor) if uses_reference(config) else None
        self.critic = critic_worker(config, total_steps) if uses_critic(config) else None
        arr = config.actor_rollout_ref
        self.rollout = RankRollout(arr.rollout, arr.model, self.actor.engine)

    def reads(self) -> list[tuple[str, str]]:
        """The configuration keys that this process has read."""
        return sorted(recorded_reads())


def roles_of_a_process(config: RunConfig, total_steps: int) -> Roles:
    """`Roles` where nothing else has recorded which keys are read."""
    record_reads(True)
    return Roles(config, total_steps)
