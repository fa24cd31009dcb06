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
from enum import Enum, StrEnum
from typing import Any

import torch
from torch import Tensor

from verl.algorithms import advantages as our_advantages
from verl.algorithms import losses as our_losses
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
from verl.config import ActorConfig, CriticConfig
from verl.doors.padded_adapters import AdvantageAdapter, PaddedFunction, PolicyLossAdapter, agg_loss
from verl.doors.padded_advantages import (
    compute_gae_advantage_return,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
    flatten_with_padding,
)
from verl.utils.errors import RegistryError

ADV_ESTIMATOR_REGISTRY: dict[str, PaddedFunction] = {}
POLICY_LOSS_REGISTRY: dict[str, PaddedFunction] = {}


class AdvantageEstimator(StrEnum):
    """Names of `algorithm.adv_estimator`."""

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


def register_adv_est(name_or_enum: str | Enum, extra: type | None = None) -> Callable[[PaddedFunction], PaddedFunction]:
    """Decorator: `fn(token_level_rewards, response_mask, config, index, ...) -> (advantages, returns)`, (bs, T) each.

    Arguments are passed by name. Always: token_level_rewards, response_mask, config. When the batch has them: index
    (group ids) and reward_baselines. Only to a function that names them: values, old_log_probs, sum_pi_squared,
    rollout_is_weights, gamma, lam; non_tensor_batch (arrays by name: uid, and the parts of rewards that
    algorithm.gdpo_reward_keys names) and batch (the other columns, padded, by name). What it names without a default
    the trainer provides: greedy answers for reward_baselines, and so on.
    Keys of its own are `algorithm.extra.*`, read as `config.extra["x"]` or `config.extra.x`; a dataclass `extra` gives
    their types and defaults, and any other key is refused.
    """
    name = _registered_name(name_or_enum)

    def add(function: PaddedFunction) -> PaddedFunction:
        if ADV_ESTIMATOR_REGISTRY.get(name) is not function:
            adapter = AdvantageAdapter(name, function, extra)
            our_advantages.register_advantage(name, adapter.check, adapter.columns, adapter.outputs)(adapter)
            ADV_ESTIMATOR_REGISTRY[name] = function
        return function

    return add


def get_adv_estimator_fn(name_or_enum: str | Enum) -> PaddedFunction:
    """The padded function of a registered estimator; an unknown name is a ValueError."""
    name = _registered_name(name_or_enum)
    our_advantages.get_advantage(name)
    return _padded_function(name, ADV_ESTIMATOR_REGISTRY, "advantage estimator")


def register_policy_loss(name: str, extra: type | None = None) -> Callable[[PaddedFunction], PaddedFunction]:
    """Decorator: `fn(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)`.

    It returns (loss, metrics); the top of this file says how the loss must be computed. `rollout_is_weights` (bs, T)
    are the importance weights of rollout correction, which it must multiply its losses by, or None. Keys of its own are
    `actor_rollout_ref.actor.policy_loss.extra.*`, read as `config.extra["x"]`; `extra` as in `register_adv_est`.
    """

    def add(function: PaddedFunction) -> PaddedFunction:
        if POLICY_LOSS_REGISTRY.get(name) is not function:
            adapter = PolicyLossAdapter(name, function, extra)
            our_losses.register_policy_loss(name, False, adapter.check, multiplies_weights=True)(adapter)
            POLICY_LOSS_REGISTRY[name] = function
        return function

    return add


def get_policy_loss_fn(name: str) -> PaddedFunction:
    """The padded function of a registered loss; an unknown name is a ValueError."""
    our_losses.get_policy_loss(name)
    return _padded_function(name, POLICY_LOSS_REGISTRY, "policy loss")


def _registered_name(name_or_enum: str | Enum) -> str:
    """A plain Enum member is registered under its value."""
    return str(name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum)


def _padded_function(name: str, functions: dict[str, PaddedFunction], kind: str) -> PaddedFunction:
    if name not in functions:
        raise RegistryError(f"{kind} {name!r} works on packed batches (verl.algorithms) and has no padded form")
    return functions[name]


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
    batch = flatten_with_padding(response_mask)
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
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The clipped value loss for padded tensors and the share of clipped tokens; the last four as in `agg_loss`."""
    ones = torch.ones_like(values)
    loss = our_losses.make_value_loss(CriticConfig(cliprange_value=cliprange_value))
    losses, metrics = loss({"values": vpreds}, {"values": values, "returns": returns, "loss_weights": ones}, None)
    counts = (dp_size, batch_num_tokens, global_batch_size, loss_scale_factor)
    return agg_loss(losses, response_mask, loss_agg_mode, *counts), metrics["vf_clipfrac"][response_mask.bool()].mean()


ADV_ESTIMATOR_REGISTRY.update(
    gae=compute_gae_advantage_return,
    grpo=compute_grpo_outcome_advantage,
    grpo_vectorized=compute_grpo_vectorized_outcome_advantage,
    grpo_passk=compute_grpo_passk_outcome_advantage,
    rloo=compute_rloo_outcome_advantage,
    rloo_vectorized=compute_rloo_vectorized_outcome_advantage,
    opo=compute_opo_outcome_advantage,
    gpg=compute_gpg_outcome_advantage,
    remax=compute_remax_outcome_advantage,
    reinforce_plus_plus=compute_reinforce_plus_plus_outcome_advantage,
    reinforce_plus_plus_baseline=compute_reinforce_plus_plus_baseline_outcome_advantage,
)
POLICY_LOSS_REGISTRY.update(vanilla=compute_policy_loss_vanilla)
