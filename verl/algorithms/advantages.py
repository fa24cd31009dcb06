"""Advantage estimators: from token rewards to the advantage and return of each sampled token.

Shapes: N sequences, T packed tokens, M sampled tokens (loss_mask True). An estimator is a plain function
`fn(batch, config) -> (advantages (T,), returns (T,))`, zero where loss_mask is False. It receives the whole batch of a
step, so group and batch statistics need no collectives.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from verl.config import AlgorithmConfig
from verl.data.batch import Batch
from verl.utils.errors import ConfigError, RegistryError, RewardError
from verl.utils.registry import Registry

AdvantageEstimator = Callable[[Batch, AlgorithmConfig], tuple[Tensor, Tensor]]

ADVANTAGES: Registry[AdvantageEstimator] = Registry("advantage estimator")
_CHECKS: dict[str, Callable[[AlgorithmConfig], None]] = {}
PLANNED = (
    "grpo_passk",
    "gdpo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
    "rloo_vectorized",
    "remax",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
)
STD_EPSILON = 1e-6  # makes the advantages of a group of (nearly) equal scores (nearly) 0


def register_advantage(
    name: str, check: Callable[[AlgorithmConfig], None] | None = None
) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator that makes an estimator selectable as `algorithm.adv_estimator=<name>`.

    `check` raises ConfigError, before the first step, for a configuration that it cannot use.
    """

    def add(function: AdvantageEstimator) -> AdvantageEstimator:
        ADVANTAGES.register(name)(function)
        if check is not None:
            _CHECKS[name] = check
        return function

    return add


def check_advantage(config: AlgorithmConfig) -> None:
    """ConfigError where `config.adv_estimator` is unknown, or cannot be used with this configuration."""
    get_advantage(config.adv_estimator)
    if config.adv_estimator in _CHECKS:
        _CHECKS[config.adv_estimator](config)


def get_advantage(name: str) -> AdvantageEstimator:
    """The estimator registered as `name`; ConfigError for an unknown one."""
    if name in PLANNED and name not in ADVANTAGES:
        known = ", ".join(ADVANTAGES.names())
        raise RegistryError(f"algorithm.adv_estimator={name} is still to come; available now: {known}")
    return ADVANTAGES.get(name)


def compute_advantages(batch: Batch, config: AlgorithmConfig) -> Batch:
    """The batch with `advantages` and `returns` (T,) of `config.adv_estimator`."""
    result = get_advantage(config.adv_estimator)(batch, config)
    expected = (batch.num_tokens,)
    if not isinstance(result, tuple) or [getattr(column, "shape", None) for column in result] != [expected] * 2:
        seen = [tuple(getattr(column, "shape", ())) for column in result] if isinstance(result, tuple) else type(result)
        raise ConfigError(
            f"advantage estimator {config.adv_estimator!r} returned {seen}; it must return (advantages, returns), "
            f"each of one number per token of the packed batch, {expected}"
        )
    advantages, returns = result
    return batch.with_columns(advantages=advantages, returns=returns)


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


@register_advantage("gae")
def gae(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over sampled tokens, whitened; returns = raw advantages + values.

    Tokens that were not sampled are skipped: a sampled token is followed by the next *sampled* token of its
    sequence, also across tool turns. Source: arXiv 1506.02438, eq. 16.
    """
    rewards = batch.require("token_rewards", "with_token_rewards or apply_kl_in_reward")
    values = batch.require("values", "Critic.values")
    mask = batch["loss_mask"]
    sequence_M = batch.sequence_ids().to(mask.device)[mask]
    rewards_M, values_M = rewards[mask].double(), values[mask].double()
    next_values = torch.zeros_like(values_M)
    next_values[:-1] = torch.where(sequence_M[1:] == sequence_M[:-1], values_M[1:], 0.0)
    deltas = rewards_M + config.gamma * next_values - values_M
    raw = discounted_suffix_sums(deltas, sequence_M, config.gamma * config.lam)
    return _to_token_column(whiten(raw), mask, rewards.dtype), _to_token_column(raw + values_M, mask, rewards.dtype)


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
        y[:-shift] = y[:-shift] + factor * torch.where(same, y[shift:], 0.0)
        shift, factor = 2 * shift, factor * factor
    return y


def whiten(x: Tensor) -> Tensor:
    """(M,) `x` shifted to mean 0 and scaled to unbiased variance 1."""
    if len(x) < 2:
        return torch.zeros_like(x)
    return (x - x.mean()) * torch.rsqrt(x.var() + 1e-8)


@register_advantage("grpo_vectorized")
@register_advantage("grpo")
def grpo(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Score of each sequence relative to its group, on each of its sampled tokens; the returns equal the advantages.

    (score - mean) / (std + 1e-6) with the unbiased std of the group, or only the difference when
    `norm_adv_by_std_in_grpo` is false (Dr.GRPO). A group of one has mean 0 and std 1. Source: arXiv 2402.03300, §4.1.2.
    """
    rewards = batch.require("token_rewards", "with_token_rewards or apply_kl_in_reward")
    # float64: in float32 the rounding error of the mean of equal scores, divided by 1e-6, would be a large advantage
    scores = batch.sum_per_sequence(rewards.double())
    means, stds = group_mean_and_std(scores, batch.require("group_ids", "Batch.pack").to(scores.device))
    advantages_N = scores - means
    if config.norm_adv_by_std_in_grpo:
        advantages_N = advantages_N / (stds + STD_EPSILON)
    mask = batch["loss_mask"]
    advantages = (advantages_N[batch.sequence_ids().to(mask.device)] * mask).to(rewards.dtype)
    return advantages, advantages


def group_mean_and_std(scores: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(N,) mean and unbiased std of each score's group; 0 and 1 for a group of one."""
    _, group = torch.unique(group_ids, return_inverse=True)
    size = torch.bincount(group).to(scores.dtype)
    mean = torch.zeros_like(size).index_add_(0, group, scores) / size
    squares = torch.zeros_like(size).index_add_(0, group, (scores - mean[group]) ** 2)
    std = torch.sqrt(squares / (size - 1).clamp(min=1))
    is_single = size == 1
    return torch.where(is_single, 0.0, mean)[group], torch.where(is_single, 1.0, std)[group]


def _to_token_column(values_M: Tensor, mask: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.zeros(mask.shape[0], dtype=dtype, device=mask.device)
    out[mask] = values_M.to(dtype)
    return out
