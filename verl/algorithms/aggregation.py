"""Loss aggregation: `loss_agg_mode` as one loss weight per token.

The weights are computed once per mini-batch from *all* its sequences. Every loss is then the plain
sum Σ w·ℓ, so micro-batch size, packing, accumulation and data-parallel degree cannot change it.
"""

import torch
from torch import Tensor

from verl.algorithms.token_rewards import group_numbers
from verl.config.algorithm import LOSS_AGG_MODES
from verl.data.batch import Batch
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean


def loss_weights(
    batch: Batch, mode: str, loss_scale_factor: float | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """(T,) loss weights of `mode`, 0 on tokens that were not sampled (`loss_mask`); `batch` is the whole mini-batch.

    token-mean: mean over sampled tokens. token-sum: no normalisation. seq-mean-token-sum and
    seq-mean-token-mean: sum or mean over a sequence, then mean over sequences. seq-mean-token-sum-norm:
    seq-mean-token-sum divided by a constant length (Dr.GRPO, arXiv 2503.20783). prompt-mean-token-mean: mean over the
    sampled tokens of all answers to a prompt, then over prompts (arXiv 2510.13786, §3.2).

    Sequences without a sampled token do not count as sequences, nor groups as prompts. `loss_scale_factor` is the
    constant length of seq-mean-token-sum-norm: `actor.loss_scale_factor`, or else the configured max response length.
    It is never the width of a padded tensor, which would change with the packing. Computed in float64, returned as
    `dtype`.
    """
    mask = batch.require("loss_mask", "Batch.pack").double()
    tokens_per_sequence = batch.sum_per_sequence(mask)  # (N,)
    num_sequences = (tokens_per_sequence > 0).sum().clamp(min=1)
    if mode == "token-mean":
        weights = mask / mask.sum().clamp(min=1)
    elif mode == "token-sum":
        weights = mask
    elif mode == "seq-mean-token-sum":
        weights = mask / num_sequences
    elif mode == "seq-mean-token-mean":
        lengths = tokens_per_sequence.clamp(min=1)[batch.sequence_ids().to(mask.device)]
        weights = mask / lengths / num_sequences
    elif mode == "seq-mean-token-sum-norm":
        weights = mask / num_sequences / _checked_scale_factor(loss_scale_factor)
    elif mode == "prompt-mean-token-mean":
        group = group_numbers(batch).to(mask.device)  # (N,)
        tokens_per_group = torch.zeros_like(tokens_per_sequence).index_add_(0, group, tokens_per_sequence)
        own_group = group[batch.sequence_ids().to(mask.device)]  # (T,)
        weights = mask / tokens_per_group.clamp(min=1)[own_group] / (tokens_per_group > 0).sum().clamp(min=1)
    else:
        raise ConfigError(f"unknown loss_agg_mode {mode!r}; {did_you_mean(mode, LOSS_AGG_MODES)}")
    return weights.to(dtype)


def _checked_scale_factor(loss_scale_factor: float | None) -> float:
    if loss_scale_factor is None or loss_scale_factor <= 0:
        raise ConfigError(
            f"loss_agg_mode=seq-mean-token-sum-norm divides by loss_scale_factor, which is {loss_scale_factor}; "
            f"set it to a positive number (usually data.max_response_length)"
        )
    return loss_scale_factor
