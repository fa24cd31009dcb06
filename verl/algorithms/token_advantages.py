"""Advantage estimators with a value, or a baseline, of their own for each token.

Shapes: N sequences, T packed tokens, M sampled tokens (loss_mask True). Tokens that were not sampled are skipped.
"""

import torch
from torch import Tensor

from verl.algorithms.advantage_registry import register_advantage
from verl.algorithms.token_rewards import (
    conversation_numbers,
    discounted_suffix_sums,
    group_numbers,
    to_token_column,
    whiten,
)
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
    whose last sampled token is at least as many tokens after their first one.

    W is the sum, up to this token, of 1 - 2 p + sum(pi^2) over sampled tokens: the squared norm of the gradient of the
    log-prob by the logits. Where one answer alone is that long its baseline is 0. For groups of several answers whose
    gradient is noisy, as late in long runs; it costs another pass of the head. Source: arXiv 2602.07078.
    """
    sampled_M, mask = _sampled_sequences(batch), batch["loss_mask"]
    order, sequence = mask.long().cumsum(0), batch.sequence_ids().to(mask.device)
    ends = torch.bincount(sampled_M, minlength=batch.num_sequences).cumsum(0)  # sampled tokens up to each end
    started = order > torch.cat([ends.new_zeros(1), ends[:-1]])[sequence]
    inside = started & (order - mask.long() < ends[sequence])
    return _subtract_baselines(batch, batch.position_ids().to(mask.device), inside)


@register_advantage("tir_optimal_token_baseline", columns=("old_logprobs",), outputs=("sum_pi_squared",))
def tir_optimal_token_baseline(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """As `optimal_token_baseline`, but answers are compared after the same number of *sampled* tokens, however long the
    tool results between them are. For answers of several turns. Same source.
    """
    return _subtract_baselines(batch, batch.sampled_mask().long().cumsum(0), batch["loss_mask"])


def _subtract_baselines(batch: Batch, clock: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages and returns. `clock` (T,) rises from token to token, and is counted from the first sampled one.

    Tokens that are not sampled add nothing to W. They are compared too where they are `inside` (T,), with W as it is.
    Where the losses have importance weights, the gradient of a token is as many times larger, and W has their squares.
    """
    mask, sequence = batch["loss_mask"], batch.sequence_ids().to(batch["loss_mask"].device)
    rewards = batch.require("token_rewards", "with_token_rewards or apply_kl_in_reward")
    returns = discounted_suffix_sums(torch.where(mask, rewards.double(), 0.0), sequence, 1.0)
    probs = batch.require("old_logprobs", "Actor.logprobs").double().exp()
    squares = batch.require("sum_pi_squared", "Actor.logprobs_and_entropy").double()
    energy = torch.where(mask, (1 - 2 * probs + squares).clamp(min=0), 0.0)
    if "rollout_is_weights" in batch:
        energy = energy * batch["rollout_is_weights"].double().square()
    sums, sampled = energy.cumsum(0), batch.sampled_mask()
    weights = sums - (sums - energy)[batch.cu_seqlens[:-1].to(mask.device)][sequence]
    first = clock.new_full((batch.num_sequences,), batch.num_tokens)
    first.scatter_reduce_(0, sequence[sampled], clock[sampled], reduce="amin")
    steps, owner = (clock - first[sequence])[inside], sequence[inside]
    outputs = _cells(conversation_numbers(batch)[owner], steps)
    shares = 1.0 / torch.bincount(outputs)[outputs].double()  # the outputs of a conversation count once
    cells = _cells(group_numbers(batch)[owner], steps)
    table = torch.zeros(3, int(cells.max()) + 1 if len(cells) else 0, dtype=torch.float64, device=mask.device)
    products = torch.stack([(returns * weights)[inside], weights[inside], torch.ones_like(shares)])
    table.index_add_(1, cells, products * shares)
    baselines = torch.where(table[2] > 1.5, table[0] / table[1].clamp(min=1e-8), 0.0)
    advantages = returns.index_add(0, inside.nonzero().squeeze(1), -baselines[cells])
    return tuple(torch.where(mask, column, 0.0).to(rewards.dtype) for column in (advantages, returns))  # type: ignore


def _cells(owner: Tensor, steps: Tensor) -> Tensor:
    """For each token the number of its cell in a table with a row of its own width for each owner."""
    widths = torch.zeros(int(owner.max()) + 1 if len(owner) else 0, dtype=torch.long, device=owner.device)
    widths.scatter_reduce_(0, owner, steps + 1, reduce="amax")
    return (widths.cumsum(0) - widths)[owner] + steps


def _sampled_sequences(batch: Batch) -> Tensor:
    """(M,) which sequence each sampled token belongs to."""
    mask = batch["loss_mask"]
    return batch.sequence_ids().to(mask.device)[mask]


def _rewards_to_go(batch: Batch, sequence_M: Tensor, discount: float) -> Tensor:
    """(M,) this and all later rewards of the sequence, discounted per sampled token, in float64."""
    rewards = batch.require("token_rewards", "with_token_rewards or apply_kl_in_reward")
    return discounted_suffix_sums(rewards[batch["loss_mask"]].double(), sequence_M, discount)
