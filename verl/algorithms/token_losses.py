"""Policy losses that limit how much each token may move, by its ratio or by its two probabilities.

Shapes: M tokens. The ratio is that of the policy's probability of the token to the old one.
"""

import torch
from torch import Tensor

from verl.algorithms.policy_loss import TokenMetrics, limited_log_ratio, register_policy_loss
from verl.config import ActorConfig
from verl.data.batch import Batch
from verl.utils.errors import ConfigError


def check_clip_ratios(config: ActorConfig) -> None:
    """ConfigError for a dual clip that would also clip inside the trust region."""
    if config.clip_ratio_c <= 1.0:
        raise ConfigError(f"actor.clip_ratio_c={config.clip_ratio_c} must be greater than 1")


@register_policy_loss("vanilla", check=check_clip_ratios)
def vanilla(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """Dual-clip PPO: -min(ratio A, clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) A).

    Source: arXiv 1707.06347 eq. 7, with separate bounds below and above (2503.14476, eq. 10) and, where the advantage
    is negative, the ratio capped at `clip_ratio_c` (1912.09729, eq. 5). For any run: the usual choice.
    """
    log_ratio = limited_log_ratio(logprobs, old_logprobs)
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


@register_policy_loss("cispo")
def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """-(clipped ratio) A log p, the ratio without gradient, so that clipped tokens keep theirs.

    For long answers, whose rare tokens clipping would silence. Source: arXiv 2506.13585, eq. 4.
    """
    log_ratio = limited_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp().detach()
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    return -clipped * advantages * logprobs, {"pg_clipfrac": clipped != ratio, "ppo_kl": -log_ratio}


@register_policy_loss("sapo", aggregation="seq-mean-token-mean")
def sapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """-A (4 / tau) sigmoid(tau (ratio - 1)): a soft gate, not a clip; tau is `tau_pos` where A > 0, else `tau_neg`.

    At ratio 1 the gradient is that of A log p; tau_neg > tau_pos lets negative advantages go sooner. For several
    mini-batches a step, where a clip would cut off all gradient of the tokens beyond it. It is defined as a mean over
    tokens, then over sequences. Source: arXiv 2511.20347, eq. 5.
    """
    log_ratio = limited_log_ratio(logprobs, old_logprobs)
    tau = torch.where(advantages > 0, logprobs.new_tensor(config.tau_pos), logprobs.new_tensor(config.tau_neg))
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1)) * (4 / tau)
    return -gate * advantages, {"ppo_kl": -log_ratio}


@register_policy_loss("gpg")
def gpg(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """-A log p: the policy gradient, without ratio or clip. For one mini-batch a step. Source: arXiv 2504.02546."""
    return -advantages * logprobs, {"ppo_kl": old_logprobs - logprobs}


def check_dro(config: ActorConfig) -> None:
    """ConfigError where the weight of the penalty is not above 0."""
    if not (config.policy_loss.dro_beta or 0) > 0:
        raise ConfigError(
            f"actor.policy_loss.loss_mode=dro needs policy_loss.dro_beta above 0; it is {config.policy_loss.dro_beta}"
        )


@register_policy_loss("dro", check=check_dro)
def dro(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """-(A log p - dro_beta / 2 (log p - log p_old)^2): no clip, but a pull to the old policy.

    For data that is off policy. Source: arXiv 2405.19107, eq. 3, per token.
    """
    assert config.policy_loss.dro_beta is not None  # check_dro
    log_ratio = logprobs - old_logprobs
    penalty = 0.5 * config.policy_loss.dro_beta * log_ratio.square()
    return penalty - advantages * logprobs, {"ppo_kl": -log_ratio}


def _dppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, divergence: Tensor, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """-(ratio, at most clip_ratio_c, without gradient) A log p; 0 for tokens that have moved too far where A points."""
    log_ratio = limited_log_ratio(logprobs, old_logprobs)
    ratio = log_ratio.exp().detach().clamp(max=config.clip_ratio_c)
    too_high = (advantages > 0) & (log_ratio > 0) & (divergence > config.clip_ratio_high)
    too_low = (advantages < 0) & (log_ratio < 0) & (divergence > config.clip_ratio_low)
    losses = torch.where(too_high | too_low, 0.0, -ratio * advantages * logprobs)
    return losses, {"pg_clipfrac": too_high, "pg_clipfrac_lower": too_low, "ppo_kl": -log_ratio}


@register_policy_loss("dppo_tv", check=check_clip_ratios)
def dppo_tv(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """Policy gradient in a trust region of total variation: |p - p_old| of the sampled token, all others as one.

    Tokens above `clip_ratio_high` (A > 0) or `clip_ratio_low` (A < 0) that would move further have no loss.
    For large vocabularies: rare tokens, whose ratio is large at once, keep their gradient. Source: arXiv
    2602.04879, §4.
    """
    divergence = (logprobs.detach().exp() - old_logprobs.exp()).abs()
    return _dppo(logprobs, old_logprobs, advantages, divergence, config)


@register_policy_loss("dppo_kl", check=check_clip_ratios)
def dppo_kl(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """As `dppo_tv`, with the divergence KL(p_old || p) in nats between the sampled token and all others.

    For a limit in nats, such as 0.05, which holds likely tokens tighter. Same source.
    """
    new, old = logprobs.detach(), old_logprobs
    divergence = old.exp() * (old - new) - old.expm1() * (_log_of_rest(old) - _log_of_rest(new))
    return _dppo(logprobs, old_logprobs, advantages, divergence, config)


def _log_of_rest(logprobs: Tensor) -> Tensor:
    """log(1 - p) of log p; of the smallest number above 0 where p is 1."""
    return (-logprobs.expm1()).clamp(min=torch.finfo(logprobs.dtype).tiny).log()
