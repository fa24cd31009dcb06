"""Padded functions as people write them outside, and what they should be given, by hand."""

from collections import defaultdict

import torch

from verl.data.batch import Batch


def outside_grpo(token_level_rewards, response_mask, index, config=None, **kwargs):
    """Group-relative scores as people write them: a loop over rows of padded tensors."""
    scores = token_level_rewards.sum(-1)
    groups = defaultdict(list)
    for i, name in enumerate(index):
        groups[name].append(scores[i])
    out = torch.zeros_like(token_level_rewards)
    for i, name in enumerate(index):
        out[i] = scores[i] - torch.stack(groups[name]).mean() if len(groups[name]) > 1 else scores[i]
    return out * response_mask, out * response_mask


def padded_by_hand(batch, name):
    """Rows from the first sampled token, one at a time."""
    bounds, mask = batch.cu_seqlens.tolist(), batch["loss_mask"]
    width = max(batch.lengths.tolist())
    out = torch.zeros(batch.num_sequences, width, dtype=batch[name].dtype)
    for i in range(batch.num_sequences):
        sampled = [t for t in range(bounds[i], bounds[i + 1]) if mask[t]]
        if sampled:
            out[i, : bounds[i + 1] - sampled[0]] = batch[name][sampled[0] : bounds[i + 1]]
    return out


def weights_of(batch: Batch) -> torch.Tensor:
    """(T,) importance weights from 0.5 to 1.5 on sampled tokens."""
    drawn = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (0.5 + drawn) * batch["loss_mask"]
