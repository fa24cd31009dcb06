"""Losses per token: the policy losses, the value loss, and their interface to the engine.

Shapes: M tokens of a micro-batch, or of a slice of one. No loss reduces over tokens: aggregation is done by the
column `loss_weights` (see aggregation.py).

Metrics have names without prefix (`pg_loss`); the caller adds `actor/` or `critic/`. A loss returns each metric as one
number per token, and the engine merges them in one of two ways:
- a metric whose name ends in `_loss` is summed with `loss_weights`, so it equals the aggregated loss of the mini-batch;
- every other metric is averaged over the sampled tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.algorithms.kl import get_kl_estimator, kl_penalty
from verl.config import ActorConfig, CriticConfig
from verl.data.batch import Batch
from verl.utils.errors import ConfigError, RegistryError
from verl.utils.registry import Registry

TokenMetrics = dict[str, Tensor]
PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, Batch, ActorConfig], tuple[Tensor, TokenMetrics]]

LOG_RATIO_LIMIT = 20.0  # nats; e^20 is far outside every clip range and still finite in float32


class TokenLoss(Protocol):
    """A loss that the engine can train: maps model outputs and batch columns to one loss per token."""

    outputs: tuple[str, ...]  # required from the model: logprobs, entropy or values
    columns: tuple[str, ...]  # required from the batch
    optional_columns: tuple[str, ...]  # read if the batch has them
    per_token: bool  # True: entry t depends on entry t of the inputs only, so any slice of tokens is a valid input

    def __call__(
        self, outputs: dict[str, Tensor], columns: dict[str, Tensor], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        """(M,) losses times `loss_weights`, and detached metrics (M,). `cu_seqlens` may be None if per_token."""
        ...


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss: `function(logprobs, old_logprobs, advantages, batch, config)`, all (M,)."""

    function: PolicyLossFunction
    per_token: bool
    check: Callable[[ActorConfig], None]  # raises ConfigError, before the first step, if the loss cannot be used

    def __call__(
        self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
    ) -> tuple[Tensor, TokenMetrics]:
        """The function's result; ConfigError if that is not one loss per token, which broadcasting would hide."""
        returned = self.function(logprobs, old_logprobs, advantages, batch, config)
        losses = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else None
        if not isinstance(losses, Tensor) or losses.shape != logprobs.shape:
            received = (
                type(returned).__name__ if losses is None else f"losses of shape {tuple(getattr(losses, 'shape', ()))}"
            )
            raise ConfigError(
                f"policy loss {config.policy_loss.loss_mode!r} returned {received}; it must return (losses, metrics) "
                f"with one loss per token, {tuple(logprobs.shape)}: the trainer reduces, by actor.loss_agg_mode"
            )
        return losses, returned[1]


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")
PLANNED = ("dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo", "bypass_mode")


def accept_any_config(config: ActorConfig) -> None:
    """Accepts every configuration."""


def register_policy_loss(
    name: str, per_token: bool = True, check: Callable[[ActorConfig], None] = accept_any_config
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Decorator that makes a loss selectable as `actor.policy_loss.loss_mode=<name>`."""

    def add(function: PolicyLossFunction) -> PolicyLossFunction:
        POLICY_LOSSES.register(name)(PolicyLoss(function, per_token, check))
        return function

    return add


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; ConfigError for an unknown one."""
    if name in PLANNED and name not in POLICY_LOSSES:
        known = ", ".join(POLICY_LOSSES.names())
        raise RegistryError(f"actor.policy_loss.loss_mode={name} is still to come; available now: {known}")
    return POLICY_LOSSES.get(name)


def check_clip_ratios(config: ActorConfig) -> None:
    """ConfigError for a dual clip that would also clip inside the trust region."""
    if config.clip_ratio_c <= 1.0:
        raise ConfigError(f"actor.clip_ratio_c={config.clip_ratio_c} must be greater than 1")


@register_policy_loss("vanilla", check=check_clip_ratios)
def vanilla(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """Dual-clip PPO.

    Source: arXiv 1707.06347 eq. 7, with separate bounds below and above (2503.14476, eq. 10) and, where the advantage
    is negative, the ratio capped at `clip_ratio_c` (1912.09729, eq. 5).
    """
    log_ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    pessimistic = torch.maximum(unclipped, clipped)
    cap = -advantages * config.clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(cap, pessimistic), pessimistic)
    return losses, {
        "pg_clipfrac": clipped > unclipped,
        "pg_clipfrac_lower": negative & (pessimistic > cap),
        "ppo_kl": -log_ratio,
    }


class ActorLoss:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference), per token."""

    def __init__(self, config: ActorConfig, observe_entropy: bool = False):
        self.config = config
        self.policy_loss = get_policy_loss(config.policy_loss.loss_mode)
        self.policy_loss.check(config)
        self.per_token = self.policy_loss.per_token
        self.with_entropy = config.entropy_coeff != 0 or config.calculate_entropy
        with_output = self.with_entropy or observe_entropy
        self.outputs: tuple[str, ...] = ("logprobs", "entropy") if with_output else ("logprobs",)
        self.columns: tuple[str, ...] = ("advantages", "loss_mask", "loss_weights")
        self.optional_columns: tuple[str, ...] = ("old_logprobs",)
        if config.use_kl_loss:
            get_kl_estimator(config.kl_loss_type)
            self.columns += ("ref_logprobs",)

    def __call__(
        self, outputs: dict[str, Tensor], columns: dict[str, Tensor], cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, TokenMetrics]:
        config, logprobs = self.config, outputs["logprobs"]
        batch = Batch(torch.tensor([0, len(logprobs)]) if cu_seqlens is None else cu_seqlens, columns, {})
        # Without old log-probs the trained policy is the one that sampled: the ratio is 1, and its gradient is kept.
        old = columns["old_logprobs"] if "old_logprobs" in columns else logprobs.detach()
        losses, metrics = self.policy_loss(logprobs, old, columns["advantages"], batch, config)
        metrics["pg_loss"] = losses
        if self.with_entropy:
            metrics["entropy_loss"] = outputs["entropy"]
        if config.entropy_coeff != 0:
            losses = losses - config.entropy_coeff * outputs["entropy"]
        if config.use_kl_loss:
            kl = kl_penalty(logprobs, columns["ref_logprobs"], config.kl_loss_type)
            metrics["kl_loss"] = kl
            metrics["kl_coef"] = kl.new_tensor(config.kl_loss_coef).expand_as(kl)
            losses = losses + config.kl_loss_coef * kl
        return losses * columns["loss_weights"], detach_metrics(metrics)


class ValueLoss:
    """Half the squared error: the maximum over unclipped values and values clipped to the old ± `cliprange_value`.

    Columns: `values` are those before the update, `returns` the targets. Source: PPO's reference implementation;
    see arXiv 2005.12729, §3.
    """

    per_token = True
    outputs: tuple[str, ...] = ("values",)
    columns: tuple[str, ...] = ("values", "returns", "loss_mask", "loss_weights")
    optional_columns: tuple[str, ...] = ()

    def __init__(self, config: CriticConfig):
        self.clip_range = config.cliprange_value

    def __call__(
        self, outputs: dict[str, Tensor], columns: dict[str, Tensor], cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, TokenMetrics]:
        values, old, returns = outputs["values"], columns["values"], columns["returns"]
        clipped_values = torch.clamp(values, old - self.clip_range, old + self.clip_range)
        unclipped, clipped = (values - returns).square(), (clipped_values - returns).square()
        losses = 0.5 * torch.maximum(unclipped, clipped)
        metrics = {"vf_loss": losses, "vf_clipfrac": clipped > unclipped, "vpred_mean": values}
        return losses * columns["loss_weights"], detach_metrics(metrics)


def make_actor_loss(config: ActorConfig, observe_entropy: bool = False) -> TokenLoss:
    """The loss of `actor.*`; ConfigError, before the first step, for a configuration that cannot be used.

    With `observe_entropy` the entropy is an output also where the loss does not contain it.
    """
    return ActorLoss(config, observe_entropy)


def make_value_loss(config: CriticConfig) -> TokenLoss:
    """The loss of `critic.*`."""
    return ValueLoss(config)


def detach_metrics(metrics: TokenMetrics) -> TokenMetrics:
    """The same numbers detached from the autograd graph, booleans as 0 and 1."""
    return {name: (m.float() if m.dtype == torch.bool else m).detach() for name, m in metrics.items()}
