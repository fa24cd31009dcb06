"""Policy losses that treat a few tokens of a mini-batch differently, chosen by covariance to keep the entropy up.

The covariance of a token is (A - mean A) (log p - mean log p) over the sampled tokens of the mini-batch, log p by the
policy at its beginning. Shapes: T tokens of a mini-batch, M of a micro-batch. Source: arXiv 2505.22617, §4.
"""

import torch
from torch import Tensor

from verl.algorithms.policy_loss import TokenMetrics, limited_log_ratio, register_policy_loss
from verl.config import ActorConfig
from verl.data.batch import Batch
from verl.utils.errors import ConfigError


def token_covariances(batch: Batch) -> Tensor:
    """(M,) float64 covariances of the sampled tokens of a mini-batch."""
    mask = batch["loss_mask"]
    advantages, logprobs = batch["advantages"][mask].double(), batch["current_logprobs"][mask].double()
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def mark_smallest(values_M: Tensor, draws_M: Tensor, count: int, mask: Tensor) -> Tensor:
    """(T,) bool: True on the `count` smallest finite values of the sampled tokens (`mask`); ties by `draws_M`."""
    by_draw = draws_M.argsort()
    order = by_draw[values_M[by_draw].sort(stable=True).indices[:count]]
    chosen_M = torch.zeros(len(values_M), dtype=torch.bool, device=mask.device)
    chosen_M[order[values_M[order].isfinite()]] = True
    out = torch.zeros_like(mask)
    out[mask] = chosen_M
    return out


def _count(share: float, tokens: int) -> int:
    """The number of tokens in this share of them: at least one, unless the share is 0."""
    return max(int(share * tokens), 1) if share > 0 else 0


def _clipped(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """PPO's losses, and where their gradient is clipped away."""
    ratio = limited_log_ratio(logprobs, old_logprobs).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def choose_for_clip_cov(batch: Batch, config: ActorConfig, draws: Tensor) -> Tensor:
    """(T,) a random `clip_cov_ratio` of all tokens (at least one, unless it is 0).

    They are among those whose covariance is inside the bounds, and which PPO does not clip.
    """
    settings, mask, current = config.policy_loss, batch["loss_mask"], batch["current_logprobs"]
    covariance = token_covariances(batch)
    old = batch.require("old_logprobs", "Actor.logprobs")
    _, is_clipped = _clipped(current, old, batch["advantages"], config)
    inside = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub) & ~is_clipped[mask]
    count = _count(settings.clip_cov_ratio, len(covariance))
    return mark_smallest(torch.where(inside, 0.0, torch.inf), draws[mask], count, mask)


def check_clip_cov(config: ActorConfig) -> None:
    """ConfigError for bounds between which no covariance is."""
    low, high = config.policy_loss.clip_cov_lb, config.policy_loss.clip_cov_ub
    if not low < high:
        raise ConfigError(
            f"actor.policy_loss.clip_cov_lb={low} must be below clip_cov_ub={high}; the chosen tokens are between"
        )


@register_policy_loss("clip_cov", check=check_clip_cov, choose_tokens=choose_for_clip_cov)
def clip_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """PPO's clipped loss, 0 for a few random tokens of high covariance, which would lower the entropy most.

    For long runs whose entropy collapses. Source: arXiv 2505.22617, §4.
    """
    losses, is_clipped = _clipped(logprobs, old_logprobs, advantages, config)
    chosen = batch["chosen_tokens"]
    metrics = {"pg_clipfrac": is_clipped, "chosen_tokens": chosen, "ppo_kl": limited_log_ratio(old_logprobs, logprobs)}
    return torch.where(chosen, 0.0, losses), metrics


def choose_for_kl_cov(batch: Batch, config: ActorConfig, draws: Tensor) -> Tensor:
    """(T,) the `kl_cov_ratio` of all tokens (at least one, unless it is 0) with the largest covariance."""
    covariance, mask = token_covariances(batch), batch["loss_mask"]
    return mark_smallest(-covariance, draws[mask], _count(config.policy_loss.kl_cov_ratio, len(covariance)), mask)


@register_policy_loss("kl_cov", choose_tokens=choose_for_kl_cov)
def kl_cov(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """-A ratio, plus ppo_kl_coef |log p - log p_old| for the tokens of the highest covariance; no clip.

    For long runs whose entropy collapses. Source: arXiv 2505.22617, §4.
    """
    log_ratio, chosen = limited_log_ratio(logprobs, old_logprobs), batch["chosen_tokens"]
    penalty = torch.where(chosen, config.policy_loss.ppo_kl_coef * log_ratio.abs(), 0.0)
    return penalty - advantages * log_ratio.exp(), {"chosen_tokens": chosen, "ppo_kl": -log_ratio}
