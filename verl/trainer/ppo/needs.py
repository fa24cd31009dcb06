"""Needs of the advantage estimator and the policy loss of a run, and whether the run provides them."""

from verl.algorithms.advantages import get_advantage
from verl.algorithms.losses import get_policy_loss
from verl.config import RunConfig
from verl.config.asynchronous import SEPARATE, staleness
from verl.config.check import trained_actor, uses_critic, uses_reference
from verl.data.columns import COLUMNS, REWARD_PART
from verl.trainer.ppo.padded_adapters import PolicyLossAdapter
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean


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


def check_columns_are_filled(config: RunConfig) -> None:
    """ConfigError, before the first step, for a column that no stage of this run fills."""
    algorithm, loss_mode = config.algorithm, trained_actor(config).policy_loss.loss_mode
    correction = algorithm.rollout_correction
    asked = {
        f"algorithm.adv_estimator={algorithm.adv_estimator}": get_advantage(algorithm.adv_estimator).columns_for(
            algorithm
        ),
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}": get_policy_loss(loss_mode).columns,
    }
    switches = {
        "values": (uses_critic(config), "critic.enable=True"),
        "rollout_is_weights": (
            correction.weighs_loss and not correction.bypass_mode,
            "algorithm.rollout_correction.rollout_is=token, without bypass_mode",
        ),
        "ref_logprobs": (uses_reference(config), "actor_rollout_ref.actor.use_kl_loss=True"),
    }
    for who, columns in asked.items():
        for name in columns:
            if name not in COLUMNS and not name.startswith(REWARD_PART):
                raise ConfigError(f"{who} asks for a column {name!r} of the batch; {did_you_mean(name, COLUMNS)}")
            provided, switch = switches.get(name, (True, ""))
            if not provided:
                raise ConfigError(f"{who} needs the column {name!r}, which this run does not fill; set {switch}")


def check_importance_weights_are_used(config: RunConfig) -> None:
    """ConfigError for a padded loss that does not multiply by the importance weights that the run computes."""
    actor = trained_actor(config)
    correction, loss = config.algorithm.rollout_correction, get_policy_loss(actor.policy_loss.loss_mode).function
    if correction.weighs_loss and isinstance(loss, PolicyLossAdapter) and loss.ignores_weights(actor):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={correction.rollout_is}, but the policy loss {loss.name!r} "
            f"ignores its argument rollout_is_weights; multiply its losses by it, or set "
            "algorithm.rollout_correction.rollout_is=null"
        )


def check_rollout_logprobs(config: RunConfig) -> None:
    """ConfigError where the loss takes the rollout's log-probs, and the engine's are not those of the policy: the
    importance weights would be off by what sampling leaves out, though both have the same weights."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    names = ["min_tokens"] if rollout.name == "sglang" else []
    if rollout.name == "vllm" and rollout.engine_kwargs.vllm.get("speculative_config"):
        names = ["top_p", "top_k", "min_tokens"]
    if rollout.name == "vllm" and rollout.logprobs_mode == "raw_logprobs" and rollout.do_sample:
        names = [*names, "temperature"]
    off = {"top_p": (1,), "top_k": (-1, 0), "min_tokens": (0,), "temperature": (1,)}
    wrong = [f"{name}={rollout[name]}" for name in names if rollout[name] not in off[name]]
    if wrong and (correction.bypass_mode or correction.corrects):
        raise ConfigError(
            f"actor_rollout_ref.rollout.{wrong[0]}: with it, the log-probs of rollout.name={rollout.name} are not the "
            "policy's (of SGLang's min_tokens, of vLLM's drafts and raw_logprobs), for which "
            "algorithm.rollout_correction takes them; leave out one of the two, or use rollout.name=native"
        )


def forced_loss_notice(config: RunConfig) -> str | None:
    """One line where bypass mode trains with another loss, or without the weights, that the configuration asks for."""
    correction, asked = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode:
        return None
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    if asked not in ("vanilla", "bypass_mode"):
        return f"actor_rollout_ref.actor.policy_loss.loss_mode={asked} has no effect: {bypass} trains with bypass_mode"
    if correction.rollout_is is not None and not correction.weighs_loss:
        return (
            f"algorithm.rollout_correction.rollout_is={correction.rollout_is} has no effect: with {bypass} and "
            "loss_type=ppo_clip the ratio of the loss is the importance weight; loss_type=reinforce has weights"
        )
    return None


def forced_aggregation_notice(config: RunConfig) -> str | None:
    """One line where the policy loss is defined with another aggregation than `loss_agg_mode` asks for."""
    actor, key = trained_actor(config), "actor_rollout_ref.actor.loss_agg_mode"
    forced = get_policy_loss(actor.policy_loss.loss_mode).aggregation
    if forced in (None, actor.loss_agg_mode) or key not in getattr(config, "_set", ()):
        return None
    return (
        f"{key}={actor.loss_agg_mode} has no effect: policy_loss.loss_mode={actor.policy_loss.loss_mode} is defined "
        f"with {forced}"
    )
