"""Advantage estimators that compare the answers to one prompt: one advantage per sequence, on all its sampled tokens.

Shapes: C conversations of N sequences, T packed tokens. A conversation is one sequence, or the several outputs of an
agent loop; its score is the mean of theirs, and the score of a sequence is the sum of its token rewards. The returns
equal the advantages. The baseline of a conversation that is alone in its group is 0.
"""

import torch
from torch import Tensor

from verl.algorithms.advantage_registry import register_advantage
from verl.algorithms.token_rewards import (
    group_mean_and_std,
    mean_per_conversation,
    on_sampled_tokens,
    scored_conversations,
    whiten_sampled_tokens,
)
from verl.config import AlgorithmConfig
from verl.data.batch import Batch
from verl.data.columns import REWARD_PART
from verl.utils.errors import ConfigError, DataError

STD_EPSILON = 1e-6  # makes the advantages of a group of (nearly) equal scores (nearly) 0


@register_advantage("grpo_vectorized")
@register_advantage("grpo")
def grpo(batch: Batch, config: AlgorithmConfig, epsilon: float = STD_EPSILON) -> tuple[Tensor, Tensor]:
    """(score - mean) / (std + `epsilon`) with the unbiased std of the group, or only the difference when
    `norm_adv_by_std_in_grpo` is false (Dr.GRPO). A group of one has mean 0 and std 1.

    For several answers per prompt, scored as a whole; the usual choice without a critic. Source: arXiv 2402.03300,
    §4.1.2.
    """
    scores, group, conversation = scored_conversations(batch)
    return _on_tokens(_relative_to_group(scores, group, config, epsilon)[conversation], batch)


def _relative_to_group(scores: Tensor, group: Tensor, config: AlgorithmConfig, epsilon: float = STD_EPSILON) -> Tensor:
    means, stds = group_mean_and_std(scores, group)
    return (scores - means) / (stds + epsilon) if config.norm_adv_by_std_in_grpo else scores - means


def _on_tokens(advantages_N: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    advantages = on_sampled_tokens(advantages_N, batch)
    return advantages, advantages


@register_advantage("grpo_passk")
def grpo_passk(batch: Batch, config: AlgorithmConfig, epsilon: float = STD_EPSILON) -> tuple[Tensor, Tensor]:
    """Only the best answer of a group has an advantage: its lead over the second best.

    Divided by the std of the group + `epsilon`, unless `norm_adv_by_std_in_grpo` is false. DataError: a group of one.
    For tasks in which one correct answer of several is enough. Source: arXiv 2503.19595, §3.
    """
    scores, group, conversation = scored_conversations(batch)
    sizes = torch.bincount(group)
    if bool((sizes < 2).any()):
        raise DataError(
            "algorithm.adv_estimator=grpo_passk compares the two best answers to a prompt, and "
            f"{int((sizes < 2).sum())} prompts have one; set actor_rollout_ref.rollout.n to 2 or more, or use grpo"
        )
    best_first = scores.sort(descending=True, stable=True).indices
    by_group = best_first[group[best_first].sort(stable=True).indices]
    first = sizes.cumsum(0) - sizes
    best, second = by_group[first], by_group[first + 1]
    leads = scores[best] - scores[second]
    if config.norm_adv_by_std_in_grpo:
        leads = leads / (group_mean_and_std(scores, group)[1][best] + epsilon)
    return _on_tokens(torch.zeros_like(scores).index_copy(0, best, leads)[conversation], batch)


def check_gdpo(config: AlgorithmConfig) -> None:
    """ConfigError for parts and weights that do not fit, and for a KL penalty, which is in no part of the reward."""
    keys, weights = config.gdpo_reward_keys, config.gdpo_reward_weights
    if not keys or len(set(keys)) < len(keys):
        raise ConfigError(
            "algorithm.adv_estimator=gdpo needs reward.weights.NAME=WEIGHT for each part of the reward, or "
            f"algorithm.gdpo_reward_keys=[NAME,...], each once: the numbers that the function returns; it is {keys}"
        )
    if weights is not None and len(weights) != len(keys):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights={weights} has {len(weights)} numbers for the {len(keys)} parts of "
            f"algorithm.gdpo_reward_keys={keys}; give one each, or null"
        )
    if config.use_kl_in_reward:
        raise ConfigError(
            "algorithm.adv_estimator=gdpo normalises the parts of the reward, and the KL penalty of "
            "algorithm.use_kl_in_reward=True is in none of them; use actor_rollout_ref.actor.use_kl_loss=True"
        )


def reward_parts_of_gdpo(config: AlgorithmConfig) -> tuple[str, ...]:
    """The columns of the parts of the reward."""
    return tuple(REWARD_PART + name for name in config.gdpo_reward_keys or ())


@register_advantage("gdpo", check=check_gdpo, columns=reward_parts_of_gdpo)
def gdpo(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Each part of the reward (`gdpo_reward_keys`) relative to its group as in grpo, summed with `gdpo_reward_weights`
    (default 1), then whitened over the sampled tokens of the batch.

    For rewards of several parts: in their sum, different answers may look equal. Source: arXiv 2601.05242, §3.
    """
    check_gdpo(config)
    columns, (scores, group, conversation) = reward_parts_of_gdpo(config), scored_conversations(batch)
    total = torch.zeros_like(scores)
    for column, weight in zip(columns, config.gdpo_reward_weights or [1.0] * len(columns), strict=True):
        part = batch.require(column, "with_reward_columns").to(group.device)
        total += weight * _relative_to_group(mean_per_conversation(part, conversation), group, config)
    advantages = whiten_sampled_tokens(total[conversation], batch)
    return advantages, advantages


@register_advantage("rloo")
def rloo(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The score less the mean score of the other answers of the group, an unbiased baseline.

    For a few answers per prompt, where a group's own mean and deviation are rough. Source: arXiv 2402.14740, eq. 8.
    """
    scores, group, conversation = scored_conversations(batch)
    sizes = torch.bincount(group)[group]
    means, _ = group_mean_and_std(scores, group)
    return _on_tokens(((scores - means) * sizes / (sizes - 1).clamp(min=1))[conversation], batch)


@register_advantage("rloo_vectorized")
def rloo_vectorized(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`rloo`, but 0 for an answer that is alone in its group, whose score `rloo` keeps.

    For data in which some prompts lose all answers but one, which then teach nothing. Same source.
    """
    _, group, conversation = scored_conversations(batch)
    advantages, _ = rloo(batch, config)
    is_compared = on_sampled_tokens((torch.bincount(group)[group] > 1).double()[conversation], batch)
    return advantages * is_compared, advantages * is_compared


@register_advantage("opo")
def opo(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The score less the mean of the group weighted by the number of sampled tokens: the baseline of least variance if
    each token adds as much to the gradient. For on-policy training (one mini-batch a step). Source: arXiv 2505.23585.
    """
    scores, group, conversation = scored_conversations(batch)
    lengths = torch.zeros_like(scores)
    lengths.index_add_(0, conversation, batch.sum_per_sequence(batch["loss_mask"].double()))
    sizes = torch.bincount(group)
    totals = torch.zeros(2, len(sizes), dtype=torch.float64, device=scores.device)
    totals.index_add_(1, group, torch.stack([lengths * scores, lengths]))
    means = torch.where(sizes == 1, 0.0, totals[0] / totals[1].clamp(min=1))
    return _on_tokens((scores - means[group])[conversation], batch)


@register_advantage("gpg")
def gpg(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """(score - mean of the group) x C / (number of scores that are not 0): answers without reward do not dilute the
    gradient. For rewards that are mostly 0, with the policy loss gpg. Source: arXiv 2504.02546, §3.2; the paper counts
    the answers of groups with unequal scores instead.
    """
    scores, group, conversation = scored_conversations(batch)
    means, _ = group_mean_and_std(scores, group)
    advantages = (scores - means) * len(scores) / torch.count_nonzero(scores).clamp(min=1)
    return _on_tokens(advantages[conversation], batch)


@register_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: Batch, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The score less the mean of the group, whitened over the sampled tokens of the batch.

    For groups so small that dividing by the deviation of each, as grpo does, is unsteady. Source: arXiv 2501.03262,
    §3.2.
    """
    scores, group, conversation = scored_conversations(batch)
    means, _ = group_mean_and_std(scores, group)
    advantages = whiten_sampled_tokens((scores - means)[conversation], batch)
    return advantages, advantages
