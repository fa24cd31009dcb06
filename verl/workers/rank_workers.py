"""The workers of one rank: of actor, reference, critic, reward model and rollout those that its pool holds."""

from collections.abc import Sequence
from pathlib import Path

from verl.config import RunConfig
from verl.config.base import record_reads, recorded_reads
from verl.config.distillation import role_name, teachers
from verl.config.reward import reward_model_place
from verl.models.fastest import keep_choices_in
from verl.observe.profiling.rank_profiler import RankProfiler
from verl.runtime.rank import RankInfo
from verl.workers.actor import build_actor_worker
from verl.workers.critic import build_critic_worker
from verl.workers.engine.rng import seed_generators
from verl.workers.engine_worker import EngineWorker
from verl.workers.rank_rollout import RankRollout
from verl.workers.reference import build_reference_worker
from verl.workers.reward_model import build_reward_model_worker
from verl.workers.teacher import build_teacher_worker


class RankWorkers:
    """One attribute for each of `roles`. Building them is a collective, in the same order on every rank of the pool,
    and seeds the process's random generators.

    A rollout copies the actor's weights, so it needs a pool with the actor.
    """

    actor: EngineWorker
    reference: EngineWorker
    critic: EngineWorker
    reward_model: EngineWorker
    rollout: RankRollout

    def __init__(self, config: RunConfig, total_steps: int, roles: Sequence[str]):
        keep_choices_in(Path(config.trainer.default_local_dir))
        seed_generators(config.actor_rollout_ref.actor.engine.seed)
        self.profiler = RankProfiler.of(config, roles, RankInfo.from_environment().rank)
        arr = config.actor_rollout_ref
        if "actor" in roles:
            self.actor = build_actor_worker(config, total_steps)
        if "reference" in roles:
            self.reference = build_reference_worker(config, self.actor if "actor" in roles else None)
        for teacher in teachers(config.distillation):
            if (role := role_name(teacher.name)) in roles:
                setattr(self, role, build_teacher_worker(config, teacher.name))
        if "critic" in roles:
            self.critic = build_critic_worker(config, total_steps)
        if "reward_model" in roles and reward_model_place(config.reward) == "ranks":
            self.reward_model = build_reward_model_worker(config)
        if "rollout" in roles:
            self.rollout = RankRollout(arr.rollout, arr.model, self.actor.engine)

    def config_keys_read(self) -> list[tuple[str, str]]:
        """The configuration keys that this process has read."""
        return sorted(recorded_reads())


def build_rank_workers(config: RunConfig, total_steps: int, roles: Sequence[str]) -> RankWorkers:
    """`RankWorkers` of a new process, which first turns on the recording of configuration reads."""
    record_reads(True)
    return RankWorkers(config, total_steps, roles)
