"""Rewards as columns of tokens, and the sums, means and deviations that advantage estimators are made of.

Shapes: N sequences, T packed tokens, M sampled tokens (loss_mask True).
"""

import torch
from torch import Tensor

from verl.data.batch import Batch
from verl.utils.errors import RewardError


def with_token_rewards(batch: Batch) -> Batch:
    """The batch with `token_rewards` (T,): the reward of a sequence on its last sampled token, 0 elsewhere.

    A sequence without a sampled token has its reward on its last token: it counts in its group but is not trained.
    """
    rewards = batch.require("rewards", "Reward.score")
    missing = torch.nonzero(rewards.isnan()).flatten().tolist()
    if missing:
        raise RewardError(
            f"{len(missing)} of {batch.num_sequences} sequences have no reward (the first is number {missing[0]}); "
            f"drop sequences that were not scored before advantages are computed"
        )
    token_rewards = rewards.new_zeros(batch.num_tokens)
    token_rewards[last_sampled_positions(batch)] = rewards
    return batch.with_columns(token_rewards=token_rewards)


def last_sampled_positions(batch: Batch) -> Tensor:
    """(N,) packed position of each sequence's last sampled token (of its last token when it has none)."""
    mask = batch.require("loss_mask", "Batch.pack")
    index = torch.arange(batch.num_tokens, device=mask.device)
    last = (batch.cu_seqlens[1:] - 1).to(mask.device)
    sampled = torch.full_like(last, -1)
    sampled.scatter_reduce_(0, batch.sequence_ids().to(mask.device), torch.where(mask, index, -1), reduce="amax")
    return torch.where(sampled >= 0, sampled, last)


def sequence_scores(batch: Batch) -> Tensor:
    """(N,) the sum of each sequence's token rewards, in float64.

    In float32 the rounding error of the mean of equal scores, divided by a tiny deviation, would be a large advantage.
    """
    return batch.sum_per_sequence(batch.require("token_rewards", "with_token_rewards or apply_kl_in_reward").double())


def group_numbers(batch: Batch) -> Tensor:
    """(N,) the groups of the sequences, numbered from 0."""
    return torch.unique(batch.require("group_ids", "Batch.pack"), return_inverse=True)[1].to(batch["loss_mask"].device)


def conversation_numbers(batch: Batch) -> Tensor:
    """(N,) the conversations of the sequences, numbered from 0 in the order of their groups."""
    group = group_numbers(batch)
    own = torch.arange(batch.num_sequences, device=group.device)
    given = batch["conversations"].to(group.device) if "conversations" in batch else torch.full_like(group, -1)
    number = torch.where(given < 0, own + given.max() + 1, given)
    return torch.unique(torch.stack([group, number]), dim=1, return_inverse=True)[1]


def mean_per_conversation(values_N: Tensor, conversation: Tensor) -> Tensor:
    """(C,) float64 mean over the outputs of each conversation, which `conversation` (N,) numbers from 0."""
    sums = torch.zeros(int(conversation.max()) + 1, dtype=torch.float64, device=values_N.device)
    return sums.index_add(0, conversation, values_N.double()) / torch.bincount(conversation)


def scored_conversations(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (C,) and groups (C,) of the conversations, and the conversation of each sequence (N,).

    A conversation of several outputs counts once: its score is their mean, and each of them gets its advantage.
    """
    conversation, group = conversation_numbers(batch), group_numbers(batch)
    group_C = group.new_zeros(int(conversation.max()) + 1).scatter(0, conversation, group)
    return mean_per_conversation(sequence_scores(batch), conversation), group_C, conversation


def group_mean_and_std(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) mean and unbiased std of each score's group; 0 and 1 for a group of one."""
    _, group = torch.unique(group_ids, return_inverse=True)
    size = torch.bincount(group).to(scores.dtype)
    mean = torch.zeros_like(size).index_add_(0, group, scores) / size
    squares = torch.zeros_like(size).index_add_(0, group, (scores - mean[group]) ** 2)
    std = torch.sqrt(squares / (size - 1).clamp(min=1))
    is_single = size == 1
    return torch.where(is_single, 0.0, mean)[group], torch.where(is_single, 1.0, std)[group]


def discounted_suffix_sums(x: Tensor, sequence: Tensor, discount: float) -> Tensor:
    """y[t] = x[t] + discount * y[t+1] inside each run of equal `sequence`, (M,) -> (M,).

    By doubling: after round k, y[t] is the sum of 2^k terms. This takes log2(longest) tensor operations instead of
    one Python step per token.
    """
    y, shift, factor = x.clone(), 1, discount
    while shift < len(y) and factor != 0.0:
        same = sequence[shift:] == sequence[:-shift]
        if not bool(same.any()):
            break
        y[:-shift].add_(torch.where(same, y[shift:], 0.0), alpha=factor)
        shift, factor = 2 * shift, factor * factor
    return y


def whiten(x: Tensor) -> Tensor:
    """(M,) `x` shifted to mean 0 and scaled to unbiased variance 1."""
    if len(x) < 2:
        return torch.zeros_like(x)
    return (x - x.mean()) * torch.rsqrt(x.var() + 1e-8)


def on_sampled_tokens(values_N: Tensor, batch: Batch) -> Tensor:
    """(T,) each sequence's value on its sampled tokens, 0 elsewhere, in the dtype of the token rewards."""
    mask = batch["loss_mask"]
    return (values_N[batch.sequence_ids().to(mask.device)] * mask).to(batch["token_rewards"].dtype)


def whiten_sampled_tokens(values_N: Tensor, batch: Batch) -> Tensor:
    """(T,) each sequence's value on its sampled tokens, whitened over all of them, 0 elsewhere."""
    mask = batch["loss_mask"]
    values_M = values_N[batch.sequence_ids().to(mask.device)[mask]]
    return to_token_column(whiten(values_M), mask, batch["token_rewards"].dtype)


def to_token_column(values_M: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    """(T,) values of the sampled tokens at their places, 0 elsewhere."""
    out = torch.zeros(mask.shape[0], dtype=dtype, device=mask.device)
    out[mask] = values_M.to(dtype)
    return out
