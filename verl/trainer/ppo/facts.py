"""Facts of a run, decided once from its configuration and its placement, before anything starts."""

from dataclasses import dataclass

from verl.algorithms.advantages import get_advantage
from verl.algorithms.losses import get_policy_loss
from verl.algorithms.old_logprobs import old_logprobs_of
from verl.config import RunConfig
from verl.config.asynchronous import SEPARATE, is_asynchronous, staleness
from verl.config.check import trained_actor, uses_critic
from verl.placement.plan import Plan
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


def num_parts(config: RunConfig) -> int:
    """In how many parts a step takes its trajectories and trains on them: each has the mini-batches of
    async_training.require_batches, and begins as soon as they are there.

    One where nothing is sampled beside the step, and where a part cannot be trained on before the others are there: for
    a critic, a KL term in the reward, and what draws sequences or tokens of the whole batch.
    """
    actor, algorithm, batch = trained_actor(config), config.algorithm, config.data.train_batch_size
    size = actor.ppo_mini_batch_size * (config.async_training.require_batches or 1)
    whole = uses_critic(config) or algorithm.use_kl_in_reward or algorithm.use_pf_ppo or actor.shuffle
    if config.trainer.v1.trainer_mode != SEPARATE or not staleness(config) or whole or batch % size:
        return 1
    return 1 if get_policy_loss(actor.policy_loss.loss_mode).choose_tokens else batch // size
