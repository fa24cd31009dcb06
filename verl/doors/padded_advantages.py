"""The advantage estimators as functions of padded tensors, by the names that published code imports.

Shapes: B rows, W response tokens. Every function returns (advantages, returns), each (B, W) and 0 outside
`response_mask`; a score is the sum of a row's `token_level_rewards`, and `index` (B,) says which rows are a group. Each
calls the estimator of `verl.algorithms` of its name, which holds the definition. `config` may be an AlgorithmConfig or
None.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.algorithms import group_advantages, token_advantages
from verl.algorithms.advantages import STD_EPSILON
from verl.config import AlgorithmConfig
from verl.data.batch import Batch, cumulative_lengths

Advantages = tuple[Tensor, Tensor]


def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> Advantages:
    """`verl.algorithms.token_advantages.gae`."""
    batch = flatten_with_padding(response_mask, token_rewards=token_level_rewards, values=values)
    return _as_rows(token_advantages.gae(batch, AlgorithmConfig(gamma=gamma, lam=lam)), response_mask)


def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = STD_EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """`verl.algorithms.group_advantages.grpo`."""
    batch, section = _groups(token_level_rewards, response_mask, index), _divided(norm_adv_by_std_in_grpo)
    return _as_rows(group_advantages.grpo(batch, section, epsilon), response_mask)


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage


def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    epsilon: float = STD_EPSILON,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> Advantages:
    """`verl.algorithms.group_advantages.grpo_passk`; DataError for a group of one row."""
    batch, section = _groups(token_level_rewards, response_mask, index), _divided(norm_adv_by_std_in_grpo)
    return _as_rows(group_advantages.grpo_passk(batch, section, epsilon), response_mask)


def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **kwargs: Any
) -> Advantages:
    """`verl.algorithms.group_advantages.rloo`."""
    batch = _groups(token_level_rewards, response_mask, index)
    return _as_rows(group_advantages.rloo(batch, AlgorithmConfig()), response_mask)


def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **kwargs: Any
) -> Advantages:
    """`verl.algorithms.group_advantages.rloo_vectorized`."""
    batch = _groups(token_level_rewards, response_mask, index)
    return _as_rows(group_advantages.rloo_vectorized(batch, AlgorithmConfig()), response_mask)


def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **kwargs: Any
) -> Advantages:
    """`verl.algorithms.group_advantages.opo`."""
    batch = _groups(token_level_rewards, response_mask, index)
    return _as_rows(group_advantages.opo(batch, AlgorithmConfig()), response_mask)


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
    """`verl.algorithms.group_advantages.gpg`, divided by `f_norm`.

    `epsilon` and `alpha` have no effect: the factor is that of the batch.
    """
    batch = _groups(token_level_rewards, response_mask, index)
    advantages, _ = _as_rows(group_advantages.gpg(batch, AlgorithmConfig()), response_mask)
    return advantages / f_norm, advantages / f_norm


def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **kwargs: Any
) -> Advantages:
    """`verl.algorithms.group_advantages.reinforce_plus_plus_baseline`."""
    batch = _groups(token_level_rewards, response_mask, index)
    return _as_rows(group_advantages.reinforce_plus_plus_baseline(batch, AlgorithmConfig()), response_mask)


def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    """`verl.algorithms.token_advantages.reinforce_plus_plus`, with the `gamma` of `config`, or 1."""
    batch = flatten_with_padding(response_mask, token_rewards=token_level_rewards)
    section = AlgorithmConfig(gamma=1.0 if config is None else config.gamma)
    return _as_rows(token_advantages.reinforce_plus_plus(batch, section), response_mask)


def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, config: Any = None, **kwargs: Any
) -> Advantages:
    """`verl.algorithms.token_advantages.remax`; `reward_baselines` (B,) are scores of greedy answers."""
    batch = flatten_with_padding(
        response_mask, {"reward_baselines": reward_baselines}, token_rewards=token_level_rewards
    )
    return _as_rows(token_advantages.remax(batch, AlgorithmConfig()), response_mask)


def flatten_with_padding(response_mask: Tensor, of_rows: dict[str, Tensor] | None = None, **columns: Tensor) -> Batch:
    """Padded rows laid end to end with their padding: B x W tokens, of which `response_mask` is the loss mask.

    `columns` are (B, W), those `of_rows` (B,).
    """
    num_sequences, width = response_mask.shape
    lengths = torch.full((num_sequences,), width, device=response_mask.device)
    flat = {name: column.flatten() for name, column in columns.items()}
    return Batch(cumulative_lengths(lengths), {"loss_mask": response_mask.flatten().bool(), **flat}, of_rows or {})


def _groups(rewards: Tensor, response_mask: Tensor, index: np.ndarray) -> Batch:
    """The batch with the groups, of any names, as numbers."""
    numbers = torch.as_tensor(np.unique(np.asarray(index), return_inverse=True)[1], device=rewards.device).flatten()
    return flatten_with_padding(response_mask, {"group_ids": numbers}, token_rewards=rewards)


def _divided(by_std: bool) -> AlgorithmConfig:
    return AlgorithmConfig(norm_adv_by_std_in_grpo=by_std)


def _as_rows(columns: Advantages, response_mask: Tensor) -> Advantages:
    advantages, returns = (column.view_as(response_mask) for column in columns)
    return advantages, returns
