"""Rollout correction: importance weights and rejection for what the rollout engine sampled with other log-probs.

Shapes: N sequences, T packed tokens, M sampled tokens (loss_mask True). The log-ratio of a token is log p of the
trained policy less log p of the rollout, at most ±20 nats. Weights: arXiv 1611.01224 and 2510.18855 (both limits);
rejection of whole answers: docs/train/rollout_correction.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.policy_loss import LOG_RATIO_LIMIT, TokenMetrics, limited_log_ratio, register_policy_loss
from verl.algorithms.token_losses import check_clip_ratios, vanilla
from verl.config import ActorConfig
from verl.config.algorithm import RejectionRule, RolloutCorrectionConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics

PREFIX = "rollout_corr/rollout_"


@register_policy_loss("bypass_mode", check=check_clip_ratios)
def bypass_mode(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, batch: Batch, config: ActorConfig
) -> tuple[Tensor, TokenMetrics]:
    """`vanilla` between the policy and the rollout, whose log-probs are the old ones (rollout_correction.bypass_mode).

    With loss_type=reinforce the loss is `gpg` times the weights instead. For runs whose rollout engine is close enough
    to the trainer that the pass for old log-probs can be saved. arXiv 1707.06347, as `vanilla`.
    """
    return vanilla(logprobs, old_logprobs, advantages, batch, config)


def correct(batch: Batch, logprobs: Tensor, config: RolloutCorrectionConfig) -> tuple[Batch, Metrics]:
    """The batch with `rollout_is_weights`, and without rejected tokens in `loss_mask`, as far as `config` asks for.

    `logprobs` (T,) are those of the policy that is trained. Rejected tokens become the column `rejected_tokens`. The
    weights carry no gradient and are 0 on tokens that are not trained.
    """
    mask, metrics = batch["loss_mask"], Metrics()
    with torch.no_grad():
        log_ratio = limited_log_ratio(logprobs.double(), batch["rollout_logprobs"].double()).masked_fill(~mask, 0.0)
        kept = mask
        for rule in config.rejection_rules():
            accepted, estimates = accepted_tokens(batch, log_ratio, rule)
            kept = kept & accepted
            _add_rejection_metrics(metrics, f"rs_{rule.name}_", batch, mask & accepted)
            _add_spread(metrics, f"rs_{rule.name}_", estimates)
        weights = importance_weights(batch, log_ratio, config, kept, metrics) if config.weighs_loss else None
    if config.rollout_rs:
        _add_rejection_metrics(metrics, "rs_", batch, kept)
        batch = batch.with_columns(loss_mask=kept, rejected_tokens=mask & ~kept)
    return (batch if weights is None else batch.with_columns(rollout_is_weights=weights.to(logprobs.dtype))), metrics


class Acceptance(NamedTuple):
    accepted: Tensor  # (T,) bool
    estimates: Tensor  # that the rule compares with its limits: one per sampled token, or per sequence with any


def accepted_tokens(batch: Batch, log_ratio: Tensor, rule: RejectionRule) -> Acceptance:
    """Which tokens the rule accepts; a rule for sequences accepts or rejects all tokens of one."""
    mask = batch["loss_mask"]
    estimate = {"k1": -log_ratio, "k2": log_ratio.square() / 2, "k3": log_ratio.expm1() - log_ratio}[rule.estimator]
    if rule.unit == "token":
        return Acceptance((estimate >= rule.low) & (estimate <= rule.high), estimate[mask])
    sequence, count = batch.sequence_ids().to(mask.device), batch.sum_per_sequence(mask.double())
    if rule.unit == "seq_max":
        start = log_ratio.new_full((batch.num_sequences,), -torch.inf)
        values = start.scatter_reduce(0, sequence[mask], estimate[mask], reduce="amax")
    else:
        values = batch.sum_per_sequence(estimate.masked_fill(~mask, 0.0))
        values = values / count.clamp(min=1) if rule.unit == "seq_mean" else values
    return Acceptance(((values >= rule.low) & (values <= rule.high))[sequence], values[count > 0])


def importance_weights(
    batch: Batch, log_ratio: Tensor, config: RolloutCorrectionConfig, kept: Tensor, metrics: Metrics
) -> Tensor:
    """(T,) float64 ratio of the token, or of its whole sequence, cut or zeroed at the limits; 0 outside `kept`.

    Normalised to mean 1 if asked for: over `kept` tokens, or over sequences that have any for weights of sequences.
    """
    mask, sequence = batch["loss_mask"], batch.sequence_ids().to(log_ratio.device)
    if config.rollout_is == "sequence":
        log_ratio = batch.sum_per_sequence(log_ratio).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)[sequence]
    raw, (low, high, zeroes) = log_ratio.exp(), weight_limits(config)
    outside = (raw < low) | (raw > high)
    used = (raw.masked_fill(outside, 0.0) if zeroes else raw.clamp(max=high)) * kept
    _add_weight_metrics(metrics, batch, raw, (low, high))
    if zeroes:
        metrics.mean(f"{PREFIX}is_oob_ratio", float((outside & mask).sum()), int(mask.sum()))
    if config.rollout_is_batch_normalize:
        per_sequence = batch.sum_per_sequence(kept.double())
        share = kept / per_sequence.clamp(min=1)[sequence] if config.rollout_is == "sequence" else kept.double()
        factor = (used * share).sum() / share.sum().clamp(min=1e-8)
        metrics.mean(f"{PREFIX}is_batch_norm_factor", float(factor), 1)
        used = used / factor.clamp(min=1e-8)
    if bool(used.any()):
        trained = used[kept]
        metrics.mean(f"{PREFIX}is_eff_sample_size", float(trained.mean().square() / trained.square().mean()), 1)
    return used


def weight_limits(config: RolloutCorrectionConfig) -> tuple[float, float, bool]:
    """Limits of the weights, and whether those outside are zeroed (lo_hi) instead of cut to the upper one.

    Where they are cut, the lower limit is 1 / upper and only counted in metrics.
    """
    numbers = [float(number) for number in str(config.rollout_is_threshold).split("_")]
    return (numbers[0], numbers[1], True) if len(numbers) > 1 else (1 / numbers[0], numbers[0], False)


def _add_weight_metrics(metrics: Metrics, batch: Batch, raw: Tensor, limits: tuple[float, float]) -> None:
    """The spread of the weights before the limits, over sampled tokens and over the means of sequences (`seq_`)."""
    mask, (low, high) = batch["loss_mask"], limits
    count = batch.sum_per_sequence(mask.double())
    means = (batch.sum_per_sequence(raw * mask) / count.clamp(min=1))[count > 0]
    for prefix, values in (("is_", raw[mask]), ("is_seq_", means)):
        _add_spread(metrics, prefix, values)
        share = "fraction" if values is means else "ratio_fraction"
        metrics.mean(f"{PREFIX}{prefix}{share}_high", float((values > high).sum()), len(values))
        metrics.mean(f"{PREFIX}{prefix}{share}_low", float((values < low).sum()), len(values))
    if len(means):
        metrics.max(f"{PREFIX}is_seq_max_deviation", float((means - 1).abs().max()))


def _add_spread(metrics: Metrics, prefix: str, values: Tensor) -> None:
    if len(values):
        metrics.mean(f"{PREFIX}{prefix}mean", float(values.sum()), len(values))
        metrics.mean(f"{PREFIX}{prefix}std", float(values.std(unbiased=False)), 1)
        metrics.max(f"{PREFIX}{prefix}max", float(values.max()))
        metrics.min(f"{PREFIX}{prefix}min", float(values.min()))


def _add_rejection_metrics(metrics: Metrics, prefix: str, batch: Batch, kept: Tensor) -> None:
    """Shares of sampled tokens, and of sequences, that lose a token where only `kept` (T,) remain."""
    mask = batch["loss_mask"]
    sampled, lost = (batch.sum_per_sequence(m.double()) for m in (mask, mask & ~kept))
    metrics.mean(f"{PREFIX}{prefix}masked_fraction", float(lost.sum()), float(sampled.sum()))
    metrics.mean(f"{PREFIX}{prefix}seq_masked_fraction", float((lost > 0).sum()), float((sampled > 0).sum()))
