"""KL estimates per token (nats), the controllers of their coefficient, and KL as part of the reward.

Source of k1, k2, k3: Schulman, "Approximating KL Divergence" (2020), http://joschu.net/blog/kl-approx.html.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from verl.algorithms.advantages import with_token_rewards
from verl.config import KLControlConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log p - log q|."""
    return (logprobs - ref_logprobs).abs()


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p - log q)^2 / 2: biased; its gradient is an unbiased estimate of the gradient of KL(p || q)."""
    return 0.5 * (logprobs - ref_logprobs).square()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, never negative; exponent clamped at ±20 nats, value at ±10."""
    log_ratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": kl_k1,
    "k1": kl_k1,
    "abs": kl_abs,
    "mse": kl_k2,
    "k2": kl_k2,
    "low_var_kl": kl_k3,
    "k3": kl_k3,
}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, name: str) -> Tensor:
    """Estimate `name` of KL(policy || reference) per token, any shape.

    With the suffix `+` (such as `k3+`) the value is that of the estimator and the gradient that of k2.
    """
    estimator = get_kl_estimator(name)
    value = estimator(logprobs, ref_logprobs)
    if not name.endswith("+"):
        return value
    gradient = kl_k2(logprobs, ref_logprobs)
    return value.detach() + (gradient - gradient.detach())


def get_kl_estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator called `name`, with or without `+`; ConfigError for an unknown one."""
    base = name.removesuffix("+")
    if base == "full":
        raise ConfigError(
            "KL estimator 'full' needs the whole distribution of both models at every token, and only the log-prob of "
            f"the sampled token is stored; choose one of {', '.join(KL_ESTIMATORS)}"
        )
    if base not in KL_ESTIMATORS:
        raise ConfigError(f"unknown KL estimator {name!r}; {did_you_mean(base, KL_ESTIMATORS)}")
    return KL_ESTIMATORS[base]


class KLController(Protocol):
    """Holds the coefficient of the KL term of the reward."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


class FixedKLController:
    """A constant coefficient."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Does nothing: the coefficient is read from the configuration, so a resumed run may change it."""


class AdaptiveKLController:
    """A coefficient that is adapted to bring the measured KL to `target_kl`. Source: arXiv 1909.08593, §2.2."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float):
        self.value, self.target, self.horizon = init_kl_coef, target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Scale by 1 + clip(current/target - 1, ±0.2) * n_steps / horizon; `n_steps` counts sequences."""
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def get_kl_controller(config: KLControlConfig) -> KLController:
    """The controller of `algorithm.kl_ctrl`."""
    if config.type == "fixed":
        return FixedKLController(config.kl_coef)
    if config.type == "adaptive":
        if config.horizon <= 0 or config.target_kl <= 0:
            raise ConfigError(
                f"algorithm.kl_ctrl.type=adaptive needs a positive horizon and target_kl, "
                f"got horizon={config.horizon}, target_kl={config.target_kl}"
            )
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    raise ConfigError(f"algorithm.kl_ctrl.type={config.type!r} is unknown; allowed: fixed, adaptive")


def apply_kl_in_reward(batch: Batch, controller: KLController, estimator: str) -> tuple[Batch, Metrics]:
    """The batch with `token_rewards` = sequence reward on the last sampled token - coef * KL(old, ref) on each.

    The controller is then updated with the KL per sampled token, averaged over sequences. Metrics:
    actor/reward_kl_penalty (that KL) and actor/reward_kl_penalty_coeff (the coefficient that was applied).
    """
    mask = batch["loss_mask"]
    old = batch.require("old_logprobs", "Actor.logprobs")
    ref = batch.require("ref_logprobs", "Reference.logprobs")
    kl = torch.where(mask, kl_penalty(old, ref, estimator), 0.0)
    batch = with_token_rewards(batch)
    token_rewards = batch["token_rewards"] - controller.value * kl

    sampled = batch.sum_per_sequence(mask.double())
    mean_kl = batch.sum_per_sequence(kl.double()) / sampled.clamp(min=1)
    num_sequences = int((sampled > 0).sum())
    metrics = Metrics()
    metrics.mean("actor/reward_kl_penalty", float(mean_kl.sum()), num_sequences)
    metrics.max("actor/reward_kl_penalty_coeff", controller.value)
    if num_sequences:
        controller.update(float(mean_kl.sum()) / num_sequences, batch.num_sequences)
    return batch.with_columns(token_rewards=token_rewards), metrics
