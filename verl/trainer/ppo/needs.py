"""What the advantage estimator and the policy loss of a run need, and whether the run provides it."""

from verl.algorithms.advantages import get_advantage
from verl.algorithms.losses import get_policy_loss
from verl.config import RunConfig
from verl.config.check import uses_critic, uses_reference
from verl.data.batch import COLUMNS, REWARD_PART
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean


def needs_baselines(config: RunConfig) -> bool:
    """Whether each prompt gets a greedy answer, whose reward is the baseline of the others."""
    return "reward_baselines" in get_advantage(config.algorithm.adv_estimator).columns_for(config.algorithm)


def check_needs(config: RunConfig) -> None:
    """ConfigError, before the first step, for a column that no stage of this run fills."""
    algorithm, loss_mode = config.algorithm, config.actor_rollout_ref.actor.policy_loss.loss_mode
    asked = {
        f"algorithm.adv_estimator={algorithm.adv_estimator}": get_advantage(algorithm.adv_estimator).columns_for(
            algorithm
        ),
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}": get_policy_loss(loss_mode).columns,
    }
    switches = {
        "values": (uses_critic(config), "critic.enable=True"),
        "ref_logprobs": (uses_reference(config), "actor_rollout_ref.actor.use_kl_loss=True"),
    }
    for who, columns in asked.items():
        for name in columns:
            if name not in COLUMNS and not name.startswith(REWARD_PART):
                raise ConfigError(f"{who} asks for a column {name!r} of the batch; {did_you_mean(name, COLUMNS)}")
            provided, switch = switches.get(name, (True, ""))
            if not provided:
                raise ConfigError(f"{who} needs the column {name!r}, which this run does not fill; set {switch}")


def forced_aggregation(config: RunConfig) -> str | None:
    """One line where the policy loss is defined with another aggregation than `loss_agg_mode` asks for."""
    actor, key = config.actor_rollout_ref.actor, "actor_rollout_ref.actor.loss_agg_mode"
    forced = get_policy_loss(actor.policy_loss.loss_mode).aggregation
    if forced in (None, actor.loss_agg_mode) or key not in getattr(config, "_set", ()):
        return None
    return (
        f"{key}={actor.loss_agg_mode} has no effect: policy_loss.loss_mode={actor.policy_loss.loss_mode} is defined "
        f"with {forced}"
    )
