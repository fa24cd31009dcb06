"""Builds the reward of a run."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config import RewardConfig, RunConfig
from verl.rewards.base import Reward
from verl.rewards.function_reward import FunctionReward
from verl.rewards.managers import find_reward_manager
from verl.rewards.model_reward import ModelReward
from verl.rewards.run_scorer import RunScorer, rules_of, scoring_reward


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


def function_reward(config: RewardConfig) -> FunctionReward:
    """The reward of the user's function, or of built-in scorers, as a command without a run asks for it."""
    return scoring_reward(config, rules_of(config))
