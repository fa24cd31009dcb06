"""The door for advantage estimators and losses written elsewhere, for padded (bs, T) tensors.

`register_adv_est` and `register_policy_loss` put an adapter into the registries of `verl.algorithms`, so an outside
function is selected and run like our own, on packed batches. It sees a padded view: one row per sequence, from its
first sampled token to its end; `response_mask` is `loss_mask` there, 0 on tool tokens and padding.

A loss must reduce with `agg_loss`, and return a linear combination of what `agg_loss` returned. Inside such a loss
`agg_loss` keeps the per-token matrix for the trainer, which applies the weights of the *whole* mini-batch, and returns
the micro-batch's own weighted mean, good for logging only. So the micro-batch size cannot change the gradient. A loss
that reduces by itself, or in which a sequence depends on the others of its micro-batch, is refused before the first
step. Nothing inside imports this module.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms import advantages as our_advantages
from verl.algorithms import losses as our_losses
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
from verl.config import ActorConfig, AlgorithmConfig, CriticConfig
from verl.data.batch import Batch, cumulative_lengths
from verl.trainer.ppo.padded_adapters import AdvantageAdapter, PaddedFunction, PolicyLossAdapter, agg_loss

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_gae_advantage_return",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]

ADV_ESTIMATOR_REGISTRY: dict[str, PaddedFunction] = {}
POLICY_LOSS_REGISTRY: dict[str, PaddedFunction] = {}


class AdvantageEstimator(StrEnum):
    """Names of `algorithm.adv_estimator`; those still to come are refused when selected."""

    GAE = "gae"
    GRPO = "grpo"
    GRPO_VECTORIZED = "grpo_vectorized"
    GRPO_PASSK = "grpo_passk"
    GDPO = "gdpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    RLOO = "rloo"
    RLOO_VECTORIZED = "rloo_vectorized"
    REMAX = "remax"
    OPO = "opo"
    GPG = "gpg"
    OPTIMAL_TOKEN_BASELINE = "optimal_token_baseline"
    TIR_OPTIMAL_TOKEN_BASELINE = "tir_optimal_token_baseline"


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[PaddedFunction], PaddedFunction]:
    """Decorator: `fn(token_level_rewards, response_mask, config, index, ...) -> (advantages, returns)`, (bs, T) each.

    Arguments are passed by name. Always: token_level_rewards, response_mask, config. When the batch has them: index
    (group ids) and reward_baselines. Only to a function that names them: values, old_log_probs, gamma, lam.
    """
    name = str(name_or_enum)

    def add(function: PaddedFunction) -> PaddedFunction:
        if ADV_ESTIMATOR_REGISTRY.get(name) is not function:
            our_advantages.register_advantage(name)(AdvantageAdapter(name, function))
            ADV_ESTIMATOR_REGISTRY[name] = function
        return function

    return add


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> PaddedFunction:
    """The padded function of a registered estimator."""
    our_advantages.get_advantage(str(name_or_enum))
    return ADV_ESTIMATOR_REGISTRY[str(name_or_enum)]


def register_policy_loss(name: str) -> Callable[[PaddedFunction], PaddedFunction]:
    """Decorator: `fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)`.

    It returns (loss, metrics); see the top of this file for what the loss may be.
    """

    def add(function: PaddedFunction) -> PaddedFunction:
        if POLICY_LOSS_REGISTRY.get(name) is not function:
            adapter = PolicyLossAdapter(name, function)
            our_losses.register_policy_loss(name, per_token=False, check=adapter.check)(adapter)
            POLICY_LOSS_REGISTRY[name] = function
        return function

    return add


def get_policy_loss_fn(name: str) -> PaddedFunction:
    """The padded function of a registered loss."""
    our_losses.get_policy_loss(name)
    return POLICY_LOSS_REGISTRY[name]


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """`verl.algorithms.advantages.gae` for padded tensors, (bs, T) each."""
    batch = _pack_padded(response_mask, token_rewards=token_level_rewards, values=values)
    advantages, returns = our_advantages.gae(batch, AlgorithmConfig(gamma=gamma, lam=lam))
    return advantages.view_as(response_mask), returns.view_as(response_mask)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    *,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> tuple[Tensor, Tensor]:
    """`verl.algorithms.advantages.grpo` for padded tensors; `index` (bs,) says which rows are a group."""
    _, group_ids = np.unique(index, return_inverse=True)
    batch = _pack_padded(response_mask, token_rewards=token_level_rewards)
    batch = Batch(batch.cu_seqlens, batch.token_columns, {"group_ids": torch.as_tensor(group_ids)})
    settings = AlgorithmConfig(norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo)
    advantages, returns = our_advantages.grpo(batch, settings)
    return advantages.view_as(response_mask), returns.view_as(response_mask)


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """`verl.algorithms.losses.vanilla` for padded tensors, reduced by `agg_loss`. `config`: ActorConfig or a view."""
    config = ActorConfig() if config is None else config
    batch = _pack_padded(response_mask)
    losses, metrics = our_losses.vanilla(
        log_prob.flatten(), old_log_prob.flatten(), advantages.flatten(), batch, config
    )
    losses = losses.view_as(response_mask)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    means = our_losses.detach_metrics({name: column[batch["loss_mask"]] for name, column in metrics.items()})
    return agg_loss(losses, response_mask, loss_agg_mode), {f"actor/{k}": float(v.mean()) for k, v in means.items()}


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """The clipped value loss for padded tensors and the share of clipped tokens."""
    ones = torch.ones_like(values)
    loss = our_losses.make_value_loss(CriticConfig(cliprange_value=cliprange_value))
    losses, metrics = loss({"values": vpreds}, {"values": values, "returns": returns, "loss_weights": ones}, None)
    return agg_loss(losses, response_mask, loss_agg_mode), metrics["vf_clipfrac"][response_mask.bool()].mean()


def _pack_padded(response_mask: Tensor, **columns: Tensor) -> Batch:
    """Padded rows as a packed batch whose sequences keep their padding, outside the loss mask."""
    num_sequences, width = response_mask.shape
    lengths = torch.full((num_sequences,), width, device=response_mask.device)
    flat = {name: column.flatten() for name, column in columns.items()}
    return Batch(cumulative_lengths(lengths), {"loss_mask": response_mask.flatten().bool(), **flat}, {})


ADV_ESTIMATOR_REGISTRY.update(
    gae=compute_gae_advantage_return,
    grpo=compute_grpo_outcome_advantage,
    grpo_vectorized=compute_grpo_outcome_advantage,
)
POLICY_LOSS_REGISTRY.update(vanilla=compute_policy_loss_vanilla)
