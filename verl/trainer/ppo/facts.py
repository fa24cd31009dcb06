"""Facts of a run, decided once from its configuration and its placement, before anything starts."""

from dataclasses import dataclass

from verl.algorithms.advantages import get_advantage
from verl.algorithms.old_logprobs import old_logprobs_of
from verl.config import RunConfig
from verl.config.asynchronous import is_asynchronous, staleness
from verl.placement.plan import Plan
from verl.trainer.ppo.needs import num_parts
from verl.trainer.ppo.parking_setup import parks


@dataclass(frozen=True)
class RunFacts:
    """The decisions that the parts of a run are built by."""

    placement: Plan
    mode: str  # trainer.v1.trainer_mode
    staleness: float  # mean age of the answers that are trained, in versions; 0 in synchronous training
    num_parts: int  # in which a step takes its trajectories
    old_logprobs: str  # as `old_logprobs_of` says
    parks: str  # as `parks` says
    baselines: bool  # whether each prompt gets a greedy answer more

    @classmethod
    def of(cls, config: RunConfig, placement: Plan) -> "RunFacts":
        """ConfigError where the advantage estimator or the policy loss is not known."""
        algorithm, mode = config.algorithm, config.trainer.v1.trainer_mode
        age, old = staleness(config) if is_asynchronous(config) else 0.0, old_logprobs_of(config)
        baselines = "reward_baselines" in get_advantage(algorithm.adv_estimator).columns_for(algorithm)
        return cls(placement, mode, age, num_parts(config), old, parks(config), baselines)
