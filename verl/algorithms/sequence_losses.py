"""Policy losses with one ratio per sequence. They get whole sequences; T tokens, N sequences."""

import torch
from torch import Tensor

from verl.algorithms.policy_loss import TokenMetrics, limited_log_ratio, register_policy_loss
from verl.config import ActorConfig
from verl.data.batch import Batch

SEQUENCE_LOG_RATIO_LIMIT = 10.0  # nats


def token_means(values: Tensor, batch: Batch) -> Tensor:
    """(T,) the mean of `values` over the sampled tokens of each token's sequence; 0 in a sequence without any."""
    mask = batch["loss_mask"]
    totals = batch.sum_per_sequence(torch.where(mask, values, 0.0))
    means = totals / batch.sum_per_sequence(mask.to(values.dtype)).clamp(min=1)
    return means[batch.sequence_ids().to(values.device)]


@register_policy_loss("gspo", per_token=False, aggregation="seq-mean-token-mean")
def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """PPO's clip on the ratio of the whole sequence, (p / p_old)^(1 / length), with a gradient per token.

    The value of the ratio is that of the sequence, its gradient s_t = s ∇ log p_t. For mixtures
    of experts and long runs, where ratios per token are unsteady; clip ranges are small (3e-4, 4e-4). Defined as a mean
    over tokens, then over sequences. Source: arXiv 2507.18071, eq. 13.
    """
    log_ratio = logprobs - old_logprobs
    sequence = token_means(log_ratio.detach(), batch)
    ratio = (logprobs - logprobs.detach() + sequence).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return torch.maximum(unclipped, clipped), {"pg_clipfrac": clipped > unclipped, "ppo_kl": -log_ratio}


@register_policy_loss("geo_mean", per_token=False, aggregation="seq-mean-token-mean", multiplies_weights=True)
def geo_mean(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """GMPO: -A x the geometric mean of the ratios of the sequence, A the mean advantage, averaged over sequences.

    Each log-ratio is clipped to -clip_ratio_low ... clip_ratio_high where it would gain from going further. Importance
    weights multiply the loss by their geometric mean over the sequence.
    For a wide clip range (0.4): it is less sensitive than GRPO to single tokens with large ratios. Source: arXiv
    2507.20673, eq. 4.
    """
    sign, log_ratio = advantages.sign(), limited_log_ratio(logprobs, old_logprobs)
    bounded = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * bounded)
    losses = -token_means(advantages, batch) * token_means(pessimistic, batch).exp()
    if "rollout_is_weights" in batch:
        losses = losses * token_means(batch["rollout_is_weights"].log(), batch).exp()
    return losses, {"pg_clipfrac": (pessimistic != log_ratio) & (sign != 0), "ppo_kl": -log_ratio}
