"""Advantage estimators: from token rewards to the advantage and return of each sampled token.

Importing this file registers the built-in estimators.
"""

from verl.algorithms.advantage_registry import (
    ADVANTAGES,
    Advantage,
    check_advantage,
    compute_advantages,
    get_advantage,
    register_advantage,
)
from verl.algorithms.group_advantages import STD_EPSILON, grpo
from verl.algorithms.token_advantages import gae
from verl.algorithms.token_rewards import (
    discounted_suffix_sums,
    group_mean_and_std,
    last_sampled_positions,
    whiten,
    with_token_rewards,
)

__all__ = [
    "ADVANTAGES",
    "STD_EPSILON",
    "Advantage",
    "check_advantage",
    "compute_advantages",
    "discounted_suffix_sums",
    "gae",
    "get_advantage",
    "group_mean_and_std",
    "grpo",
    "last_sampled_positions",
    "register_advantage",
    "whiten",
    "with_token_rewards",
]
