"""Advantage estimators with a value, or a baseline, of their own for each token.

Shapes: N sequences, T packed tokens, M sampled tokens (loss_mask True). Tokens that were not sampled are skipped.
"""

import torch
from torch import Tensor

from verl.algorithms.advantage_registry import register_advantage
from verl.algorithms.token_rewards import discounted_suffix_sums, group_numbers, to_token_column, whiten
from verl.config import AlgorithmConfig
from verl.data.batch import Batch


@register_advantage("gae", columns=("values",))
def gae(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over sampled tokens, whitened; returns = raw advantages + values.

    Tokens that were not sampled are skipped: a sampled token is followed by the next *sampled* token of its
    sequence, also across tool turns. For credit by token, or one answer per prompt; it alone needs a critic. Source:
    arXiv 1506.02438, eq. 16.
    """
    rewards = batch.require("token_rewards", "with_token_rewards or apply_kl_in_reward")
    values = batch.require("values", "Critic.values")
    mask = batch["loss_mask"]
    sequence_M = _sampled_sequences(batch)
    rewards_M, values_M = rewards[mask].double(), values[mask].double()
    next_values = torch.zeros_like(values_M)
    next_values[:-1] = torch.where(sequence_M[1:] == sequence_M[:-1], values_M[1:], 0.0)
    deltas = rewards_M + config.gamma * next_values - values_M
    raw = discounted_suffix_sums(deltas, sequence_M, config.gamma * config.lam)
    return to_token_column(whiten(raw), mask, rewards.dtype), to_token_column(raw + values_M, mask, rewards.dtype)


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Rewards to go, discounted by `gamma` per sampled token, whitened over the batch; the returns are not whitened.

    For one answer per prompt: it needs neither groups nor a critic. Source: arXiv 2501.03262, §3.1.
    """
    mask, returns_M = batch["loss_mask"], _rewards_to_go(batch, _sampled_sequences(batch), config.gamma)
    dtype = batch["token_rewards"].dtype
    return to_token_column(whiten(returns_M), mask, dtype), to_token_column(returns_M, mask, dtype)


@register_advantage("remax", columns=("reward_baselines",))
def remax(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Rewards to go less the score of a greedy answer to the same prompt, which is sampled beside the others.

    For few answers per prompt: the baseline costs one. Source: arXiv 2310.10505, algorithm 1.
    """
    mask, sequence_M = batch["loss_mask"], _sampled_sequences(batch)
    returns_M = _rewards_to_go(batch, sequence_M, 1.0)
    baselines = batch.require("reward_baselines", "RolloutCollector.collect").double().to(mask.device)
    advantages_M = returns_M - baselines[sequence_M]
    dtype = batch["token_rewards"].dtype
    return to_token_column(advantages_M, mask, dtype), to_token_column(returns_M, mask, dtype)


@register_advantage("optimal_token_baseline", columns=("old_logprobs",), outputs=("sum_pi_squared",))
def optimal_token_baseline(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Reward to go less the baseline of least variance for this token: sum(G W) / sum(W) over the answers of the group
    that have a sampled token as many tokens after their first one.

    W is the sum, up to this token, of 1 - 2 p + sum(pi^2): the squared norm of the gradient of the log-prob by the
    logits. Where one answer alone is that long its baseline is 0. For groups of several answers whose gradient is
    noisy, as late in long runs; it costs another pass of the head. Source: arXiv 2602.07078.
    """
    return _subtract_baselines(batch, batch.position_ids().to(batch["loss_mask"].device))


@register_advantage("tir_optimal_token_baseline", columns=("old_logprobs",), outputs=("sum_pi_squared",))
def tir_optimal_token_baseline(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """As `optimal_token_baseline`, but answers are compared after the same number of *sampled* tokens, however long the
    tool results between them are. For answers of several turns. Same source.
    """
    return _subtract_baselines(batch, batch.sampled_mask().long().cumsum(0))


def _subtract_baselines(batch: Batch, clock: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns; `clock` (T,) rises from token to token, and is counted from the first sampled one.

    Where the losses have importance weights, the gradient of a token is as many times larger, and W has their squares.
    """
    mask, sequence_M = batch["loss_mask"], _sampled_sequences(batch)
    returns_M = _rewards_to_go(batch, sequence_M, 1.0)
    probs_M = batch.require("old_logprobs", "Actor.logprobs")[mask].double().exp()
    squares_M = batch.require("sum_pi_squared", "Actor.logprobs_and_entropy")[mask].double()
    energy = (1 - 2 * probs_M + squares_M).clamp(min=0)
    if "rollout_is_weights" in batch:
        energy = energy * batch["rollout_is_weights"][mask].double().square()
    counts = torch.bincount(sequence_M, minlength=batch.num_sequences)
    starts_M = (counts.cumsum(0) - counts)[sequence_M]  # index of the first sampled token of the sequence
    sums = energy.cumsum(0)
    weights_M = sums - (sums - energy)[starts_M]
    first = clock.new_full((batch.num_sequences,), batch.num_tokens)
    sampled = batch.sampled_mask()
    first.scatter_reduce_(0, batch.sequence_ids().to(mask.device)[sampled], clock[sampled], reduce="amin")
    steps_M, group_M = clock[mask] - first[sequence_M], group_numbers(batch)[sequence_M]
    widths = torch.zeros(batch.num_sequences, dtype=torch.long, device=mask.device)
    widths.scatter_reduce_(0, group_M, steps_M + 1, reduce="amax")
    cells_M = (widths.cumsum(0) - widths)[group_M] + steps_M  # of a table with a row of its own width per group
    table = torch.zeros(3, int(widths.sum()), dtype=torch.float64, device=mask.device)
    table.index_add_(1, cells_M, torch.stack([returns_M * weights_M, weights_M, torch.ones_like(weights_M)]))
    baselines = torch.where(table[2] > 1, table[0] / table[1].clamp(min=1e-8), 0.0)
    dtype = batch["token_rewards"].dtype
    return to_token_column(returns_M - baselines[cells_M], mask, dtype), to_token_column(returns_M, mask, dtype)


def _sampled_sequences(batch: Batch) -> Tensor:
    """(M,) which sequence each sampled token belongs to."""
    mask = batch["loss_mask"]
    return batch.sequence_ids().to(mask.device)[mask]


def _rewards_to_go(batch: Batch, sequence_M: Tensor, discount: float) -> Tensor:
    """(M,) this and all later rewards of the sequence, discounted per sampled token, in float64."""
    rewards = batch.require("token_rewards", "with_token_rewards or apply_kl_in_reward")
    return discounted_suffix_sums(rewards[batch["loss_mask"]].double(), sequence_M, discount)
