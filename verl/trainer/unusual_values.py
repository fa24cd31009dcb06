"""Values that a run accepts and that are seldom meant: a line for each, before the first step."""

from collections.abc import Iterator

from verl.config import RunConfig
from verl.config.check import uses_critic
from verl.trainer.run.folder import AnyConfig

LARGEST_USUAL_RATE = 1e-2


def unusual_value_lines(config: AnyConfig) -> list[str]:
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
