"""Losses per token: the policy losses, the value loss, and their interface to the engine.

Shapes: M tokens of a micro-batch, or of a slice of one. No loss reduces over tokens: aggregation is done by the
column `loss_weights` (see aggregation.py).

Metrics have names without prefix (`pg_loss`); the caller adds `actor/` or `critic/`. A loss returns each metric as one
number per token, and the engine merges them in one of two ways:
- a metric whose name ends in `_loss` is summed with `loss_weights`, so it equals the aggregated loss of the mini-batch;
- every other metric is averaged over the sampled tokens.
"""

from typing import Protocol

import torch
from torch import Tensor

from verl.algorithms import covariance_losses, rollout_correction, sequence_losses  # noqa: F401 - they register their losses
from verl.algorithms.distillation import DistillationTerm
from verl.algorithms.kl import get_kl_estimator, kl_penalty
from verl.algorithms.policy_loss import (
    POLICY_LOSSES,
    PolicyLoss,
    TokenMetrics,
    aggregation_mode,
    detach_metrics,
    get_policy_loss,
    losses_per_token,
    register_policy_loss,
    with_chosen_tokens,
)
from verl.algorithms.token_losses import check_clip_ratios, vanilla
from verl.config import ActorConfig, CriticConfig, DistillationConfig, RolloutCorrectionConfig
from verl.data.batch import Batch

__all__ = [
    "POLICY_LOSSES",
    "ActorLoss",
    "PolicyLoss",
    "TokenLoss",
    "TokenMetrics",
    "ValueLoss",
    "aggregation_mode",
    "check_clip_ratios",
    "detach_metrics",
    "get_policy_loss",
    "losses_per_token",
    "make_actor_loss",
    "make_value_loss",
    "register_policy_loss",
    "vanilla",
    "with_chosen_tokens",
]


class TokenLoss(Protocol):
    """A loss that the engine can train: maps model outputs and batch columns to one loss per token."""

    outputs: tuple[str, ...]  # required from the model: logprobs, entropy, sum_pi_squared or values
    columns: tuple[str, ...]  # required from the batch
    optional_columns: tuple[str, ...]  # read if the batch has them
    per_token: bool  # True: entry t depends on entry t of the inputs only, so any slice of tokens is a valid input

    def __call__(
        self, outputs: dict[str, Tensor], columns: dict[str, Tensor], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, TokenMetrics]:
        """(M,) losses times `loss_weights`, and detached metrics (M,). `cu_seqlens` may be None if per_token."""
        ...


class ActorLoss:
    """Policy loss x importance weight - entropy_coeff x entropy + kl_loss_coef x KL(policy || reference), per token.

    With distillation its term is added; without `use_task_rewards` it replaces the policy loss.
    """

    def __init__(
        self,
        config: ActorConfig,
        observe_entropy: bool = False,
        correction: RolloutCorrectionConfig | None = None,
        distillation: DistillationConfig | None = None,
    ):
        self.config, correction = config, correction or RolloutCorrectionConfig()
        self.term = None
        if distillation is not None and distillation.enabled:
            self.term = DistillationTerm(distillation.distillation_loss, config)
        reinforce = correction.bypass_mode and correction.loss_type == "reinforce"
        self.policy_loss = get_policy_loss("gpg" if reinforce else config.policy_loss.loss_mode)
        self.policy_loss.check(config)
        self.with_entropy = config.entropy_coeff != 0 or config.calculate_entropy
        with_output = self.with_entropy or observe_entropy
        asked = ("logprobs", *(("entropy",) if with_output else ()), *self.policy_loss.outputs)
        self.outputs: tuple[str, ...] = tuple(dict.fromkeys(asked))
        in_one_pass = {"logprobs", "entropy"}.issuperset(self.outputs)  # the head gives no other output block by block
        self.per_token = self.policy_loss.per_token and in_one_pass
        chosen = ("chosen_tokens",) if self.policy_loss.choose_tokens else ()
        self.columns: tuple[str, ...] = ("advantages", "loss_mask", "loss_weights", *chosen, *self.policy_loss.columns)
        self.optional_columns: tuple[str, ...] = ("old_logprobs",)
        if correction.weighs_loss:
            self.columns += ("rollout_is_weights",)
        self.multiplied = correction.weighs_loss and not self.policy_loss.multiplies_weights
        if config.use_kl_loss:
            get_kl_estimator(config.kl_loss_type)
            self.columns += ("ref_logprobs",)
        if self.term is not None:
            self.outputs, self.columns = self.outputs + self.term.outputs, self.columns + self.term.columns
            self.per_token = self.per_token and self.term.per_token and not self.term.outputs

    def __call__(
        self, outputs: dict[str, Tensor], columns: dict[str, Tensor], cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, TokenMetrics]:
        config, logprobs = self.config, outputs["logprobs"]
        seen = columns | {name: outputs[name] for name in self.policy_loss.outputs}
        batch = Batch(torch.tensor([0, len(logprobs)]) if cu_seqlens is None else cu_seqlens, seen, {})
        # Without old log-probs the trained policy is the one that sampled: the ratio is 1, and its gradient is kept.
        old = columns["old_logprobs"] if "old_logprobs" in columns else logprobs.detach()
        returned = self.policy_loss.function(logprobs, old, columns["advantages"], batch, config)
        losses, metrics = losses_per_token(f"policy loss {config.policy_loss.loss_mode!r}", returned, logprobs)
        if self.multiplied:
            losses = losses * columns["rollout_is_weights"]
        metrics["pg_loss"] = losses
        if self.term is not None:
            distilled, of_term = self.term(outputs, batch, old)
            losses = losses + distilled if self.term.config.use_task_rewards else distilled
            metrics |= of_term
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


def make_actor_loss(
    config: ActorConfig,
    observe_entropy: bool = False,
    correction: RolloutCorrectionConfig | None = None,
    distillation: DistillationConfig | None = None,
) -> TokenLoss:
    """The loss of `actor.*`, and of `distillation.*` if it is enabled.

    ConfigError, before the first step, for a configuration that cannot be used.

    With `observe_entropy` the entropy is an output also where the loss does not contain it. With a `correction` that
    weighs the loss, the batch needs the column `rollout_is_weights`.
    """
    return ActorLoss(config, observe_entropy, correction, distillation)


def make_value_loss(config: CriticConfig) -> TokenLoss:
    """The loss of `critic.*`."""
    return ValueLoss(config)
