"""Advantage estimators as functions of padded tensors, importable by name from `verl.trainer.ppo.core_algos`.

Shapes: B rows, W response tokens. Every function returns (advantages, returns), each (B, W) and 0 outside
`response_mask`; a score is the sum of a row's `token_level_rewards`, and `index` (B,) says which rows are a group. The
baseline of a row that is alone in its group is 0. `config` may be an AlgorithmConfig or None.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms.advantages import STD_EPSILON, gae, group_mean_and_std, whiten
from verl.config import AlgorithmConfig
from verl.data.batch import Batch, cumulative_lengths
from verl.utils.errors import DataError

Advantages = tuple[Tensor, Tensor]


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Advantages:
    """`verl.algorithms.advantages.gae`."""
    batch = pack_padded(response_mask, token_rewards=token_level_rewards, values=values)
    advantages, returns = gae(batch, AlgorithmConfig(gamma=gamma, lam=lam))
    return advantages.view_as(response_mask), returns.view_as(response_mask)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = STD_EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """(score - mean) / (std + epsilon) of the group; without the divisor if not `norm_adv_by_std_in_grpo`."""
    scores, means, stds, _ = _groups(token_level_rewards, index)
    advantages = (scores - means) / (stds + epsilon) if norm_adv_by_std_in_grpo else scores - means
    return _on_tokens(advantages, token_level_rewards, response_mask)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = STD_EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """The best row of a group gets its lead over the second best, divided by the group's std; the others get 0.

    Source: arXiv 2503.19595. DataError for a group of one row.
    """
    scores, _, stds, group = _groups(token_level_rewards, index)
    advantages = torch.zeros_like(scores)
    for number in group.unique():
        rows = torch.nonzero(group == number).flatten()
        if len(rows) < 2:
            raise DataError(f"grpo_passk needs at least 2 rows in a group; row {int(rows[0])} is alone in its group")
        best, second = torch.topk(scores[rows], 2).values
        winner = rows[scores[rows].argmax()]
        advantages[winner] = (best - second) / (stds[winner] + epsilon if norm_adv_by_std_in_grpo else 1)
    return _on_tokens(advantages, token_level_rewards, response_mask)


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **kwargs: Any
) -> Advantages:
    """The score less the mean of the other rows of the group. Source: arXiv 2402.14740."""
    scores, means, _, group = _groups(token_level_rewards, index)
    sizes = torch.bincount(group)[group]
    return _on_tokens((scores - means) * sizes / (sizes - 1).clamp(min=1), token_level_rewards, response_mask)


compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **kwargs: Any
) -> Advantages:
    """The score less the group's mean, in which a row counts by its number of tokens. Source: arXiv 2505.23585."""
    scores, _, _, group = _groups(token_level_rewards, index)
    lengths = response_mask.sum(-1).double()
    zeros = torch.zeros(len(group.unique()), dtype=torch.float64, device=scores.device)
    means = zeros.index_add(0, group, lengths * scores) / zeros.index_add(0, group, lengths).clamp(min=1)
    single = torch.bincount(group) == 1
    return _on_tokens(scores - torch.where(single, 0.0, means)[group], token_level_rewards, response_mask)


def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = STD_EPSILON,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: Any = None,
    **kwargs: Any,
) -> Advantages:
    """(score - mean of the group) x B / (number of scores that are not 0) / f_norm. Source: arXiv 2504.02546.

    `epsilon` and `alpha` have no effect: the factor is that of the batch.
    """
    scores, means, _, _ = _groups(token_level_rewards, index)
    factor = len(scores) / torch.count_nonzero(scores).clamp(min=1)
    return _on_tokens((scores - means) * factor / f_norm, token_level_rewards, response_mask)


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **kwargs: Any
) -> Advantages:
    """The score less the group's mean, whitened over the tokens of the batch. Source: arXiv 2501.03262."""
    scores, means, _, _ = _groups(token_level_rewards, index)
    advantages, _ = _on_tokens(scores - means, token_level_rewards, response_mask)
    advantages = _whiten(advantages, response_mask)
    return advantages, advantages


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    """Discounted rewards to go as returns, whitened over the tokens of the batch as advantages (same source)."""
    returns = _rewards_to_go(token_level_rewards, response_mask, 1.0 if config is None else config.gamma)
    return _whiten(returns, response_mask), returns


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    """Rewards to go less the score of a greedy answer, `reward_baselines` (B,). Source: arXiv 2310.10505."""
    returns = _rewards_to_go(token_level_rewards, response_mask, 1.0)
    return (returns - reward_baselines[:, None]) * response_mask, returns


def pack_padded(response_mask: Tensor, **columns: Tensor) -> Batch:
    """Padded rows as a packed batch whose sequences keep their padding, outside the loss mask."""
    num_sequences, width = response_mask.shape
    lengths = torch.full((num_sequences,), width, device=response_mask.device)
    flat = {name: column.flatten() for name, column in columns.items()}
    return Batch(cumulative_lengths(lengths), {"loss_mask": response_mask.flatten().bool(), **flat}, {})


def _groups(rewards: Tensor, index: np.ndarray) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(B,) scores, means and stds of their groups in float64, and the groups' numbers."""
    group = torch.as_tensor(np.unique(np.asarray(index), return_inverse=True)[1], device=rewards.device).flatten()
    scores = rewards.double().sum(-1)
    return scores, *group_mean_and_std(scores, group), group


def _on_tokens(advantages: Tensor, rewards: Tensor, mask: Tensor) -> Advantages:
    tokens = (advantages[:, None] * mask).to(rewards.dtype)
    return tokens, tokens


def _rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """(B, W) the sum of this and all later rewards of a row, discounted per sampled token; others are skipped."""
    returns, running = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t] != 0, rewards[:, t] + gamma * running, running)
        returns[:, t] = running * (mask[:, t] != 0)
    return returns


def _whiten(values: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(values)
    out[mask.bool()] = whiten(values[mask.bool()])
    return out
