"""Builds the reward of a run."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config import RewardConfig, RunConfig
from verl.rewards.base import Reward
from verl.rewards.function_reward import FunctionReward
from verl.rewards.managers import find_reward_manager
from verl.rewards.model_reward import ModelReward
from verl.rewards.run_scorer import RunScorer, built_in_kwargs, load_custom, rules_of
from verl.rewards.scorer_lookup import score_row


def build_reward(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    model: ModelReward | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
) -> Reward:
    """The reward that `reward.*` describes; ConfigError when it cannot be built.

    `model` is that of a reward model: it scores where no custom function is set, and beside one as the part `rm` of
    reward.weights. A custom function gets `model_kwargs`
    (`reward_router_address`, `reward_model_tokenizer`) with every call; its own reward_kwargs win.
    """
    scorer = RunScorer(config, tokenizer, model, model_kwargs or {})
    return find_reward_manager(config.reward.reward_manager)(scorer)


def custom_reward(config: RewardConfig) -> FunctionReward:
    """The reward of the user's function, which is loaded from its file."""
    return FunctionReward(*load_custom(config), rules_of(config))


def built_in_reward(config: RewardConfig) -> FunctionReward:
    """The reward of built-in scorers, chosen by data_source and called with reward.reward_kwargs (such as method)."""
    return FunctionReward(score_row, "default_compute_score", built_in_kwargs(config), rules_of(config))
