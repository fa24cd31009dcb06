"""Keys that were set but that nothing reads: told before the first step, or after it where only a step can tell."""

import fnmatch

from verl.config import RunConfig
from verl.config.algorithm import ESTIMATORS
from verl.config.check import uses_critic
from verl.config.load import unread_keys

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def unread_before_steps(config: RunConfig) -> list[str]:
    """Unread keys that no step will read either."""
    return [key for key in unread_keys(config) if not _step_may_read(config, key)]


def unread_by_a_step(config: RunConfig) -> list[str]:
    """Unread keys that the first step could have read."""
    return [key for key in unread_keys(config) if _step_may_read(config, key)]


def _step_may_read(config: RunConfig, key: str) -> bool:
    return any(may and fnmatch.fnmatchcase(key, pattern) for pattern, may in _read_in_steps(config).items())


def _read_in_steps(config: RunConfig) -> dict[str, bool]:
    """Pattern of keys that no code reads before a step -> whether steps of this run may."""
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    estimator, correction, critic = algorithm.adv_estimator, algorithm.rollout_correction, uses_critic(config)
    own = estimator not in ESTIMATORS
    return {
        "algorithm.gamma": own or estimator in ("gae", "reinforce_plus_plus"),
        "algorithm.lam": own or estimator == "gae",
        "algorithm.norm_adv_by_std_in_grpo": own or estimator.startswith(("grpo", "gdpo")),
        "algorithm.kl_penalty": algorithm.use_kl_in_reward,
        "algorithm.pf_ppo.*": algorithm.use_pf_ppo,
        "algorithm.filter_groups.*": algorithm.filter_groups.enable,
        "algorithm.rollout_correction.rollout_is_*": correction.rollout_is is not None,
        "algorithm.rollout_correction.rollout_rs*": True,
        f"{_ACTOR}.kl_loss_*": actor.use_kl_loss,
        f"{_ACTOR}.policy_loss.*": True,
        **{f"{_ACTOR}.{name}*": True for name in ("clip_ratio", "calculate_", "loss_", "tau_")},
        "*.optim.clip_grad": True,
        "*_offload": True,
        "critic.*": critic,
        "distillation.*": config.distillation.enabled,
        f"{_ROLLOUT}.calculate_log_probs": True,
        f"{_ROLLOUT}.val_kwargs.*": bool(config.data.val_files),
        **{f"{_ROLLOUT}.{name}.*": True for name in ("agent", "multi_turn", "trace", "checkpoint_engine", "server")},
        "reward.*": True,
        "trainer.critic_warmup": True,
        "trainer.v1.*": True,
    }
