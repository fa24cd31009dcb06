"""Doubts about a configuration alone: values that are seldom meant, and keys that nothing reads.

Mistakes in it are refused by `verl.config.check`.
"""

import fnmatch
from collections.abc import Iterator

from verl.config import RunConfig, SFTConfig
from verl.config.algorithm import ESTIMATORS
from verl.config.check import uses_critic
from verl.config.load import unread_keys

LARGEST_USUAL_RATE = 1e-2
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def unusual_value_lines(config: RunConfig | SFTConfig) -> list[str]:
    """Lines about unusual values of a run."""
    lines = _of_reinforcement(config) if isinstance(config, RunConfig) else _of_rate("optim.lr", config.optim.lr)
    return [f"warning: {line}" for line in lines]


def _of_rate(key: str, rate: float) -> Iterator[str]:
    if rate > LARGEST_USUAL_RATE:
        yield f"{key}={rate:g} is above {LARGEST_USUAL_RATE:g}, where training seldom survives; usual are 1e-6 to 1e-4"


def _of_reinforcement(config: RunConfig) -> Iterator[str]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    trained = [("actor_rollout_ref.actor", actor)] + ([("critic", config.critic)] if uses_critic(config) else [])
    for role, part in trained:
        yield from _of_rate(f"{role}.optim.lr", part.optim.lr)
        batch, mini = config.data.train_batch_size, part.ppo_mini_batch_size
        if batch % mini:
            yield (
                f"{role}.ppo_mini_batch_size={mini} does not divide data.train_batch_size={batch}: the last mini-batch "
                f"of a step has {batch % mini} prompts, and its optimiser step weighs as much as the others"
            )
    for name in ("clip_ratio_low", "clip_ratio_high"):
        if (ratio := actor[name]) >= 1:
            name = "clip_ratio" if actor.clip_ratio == ratio else name
            yield f"actor_rollout_ref.actor.{name}={ratio:g} clips next to nothing; usual are 0.1 to 0.3"
            break
    weight, usual = algorithm.kl_ctrl.kl_coef, type(algorithm.kl_ctrl)().kl_coef
    if not algorithm.use_kl_in_reward and weight not in (0, usual):
        yield (
            f"algorithm.kl_ctrl.kl_coef={weight:g} has no effect: it is of the KL penalty in the reward, which is off; "
            "set algorithm.use_kl_in_reward=True, or actor_rollout_ref.actor.kl_loss_coef for the loss"
        )


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
