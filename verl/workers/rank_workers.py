"""The workers of one rank: actor, reference, critic and rollout."""

from pathlib import Path

from verl.config import RunConfig
from verl.config.base import record_reads, recorded_reads
from verl.config.check import uses_critic, uses_reference
from verl.models.fastest import keep_choices_in
from verl.workers.actor import build_actor_worker
from verl.workers.critic import build_critic_worker
from verl.workers.engine.rng import seed_generators
from verl.workers.rank_rollout import RankRollout
from verl.workers.reference import build_reference_worker


class RankWorkers:
    """The workers of one rank. Building them is a collective, in the same order on every rank."""

    def __init__(self, config: RunConfig, total_steps: int):
        keep_choices_in(Path(config.trainer.default_local_dir))
        seed_generators(config.actor_rollout_ref.actor.engine.seed)
        self.actor = build_actor_worker(config, total_steps)
        self.reference = build_reference_worker(config, self.actor) if uses_reference(config) else None
        self.critic = build_critic_worker(config, total_steps) if uses_critic(config) else None
        arr = config.actor_rollout_ref
        self.rollout = RankRollout(arr.rollout, arr.model, self.actor.engine)

    def config_keys_read(self) -> list[tuple[str, str]]:
        """The configuration keys that this process has read."""
        return sorted(recorded_reads())


def build_rank_workers(config: RunConfig, total_steps: int) -> RankWorkers:
    """`RankWorkers` of a new process, which first turns on the recording of configuration reads."""
    record_reads(True)
    return RankWorkers(config, total_steps)
