"""Builds the reward of a run: the custom function if one is configured, else the built-in scorers."""

from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.config import RewardConfig, RunConfig
from verl.rewards.base import Reward
from verl.rewards.function_reward import FunctionReward
from verl.rewards.managers import PENALTY_KEYS, find_reward_manager
from verl.rewards.process_state import ProcessGuard
from verl.rewards.scorer_lookup import score_row
from verl.utils.errors import ConfigError
from verl.utils.external_code import load_object


def build_reward(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Reward:
    """The reward that `reward.*` describes; ConfigError when it cannot be built."""
    reward = config.reward
    function = custom_reward(reward) if reward.custom_reward_function.path else built_in_reward(reward)
    return find_reward_manager(reward.reward_manager.name)(function, config)


def custom_reward(config: RewardConfig) -> FunctionReward:
    """The reward of the user's function, which is loaded from its file."""
    custom = config.custom_reward_function
    with ProcessGuard(f"the import of {custom.path}").importing():
        function = load_object(custom.path or "", custom.name, "reward.custom_reward_function")
    if not callable(function):
        raise ConfigError(
            f"reward.custom_reward_function.name={custom.name!r} in {custom.path} is {type(function).__name__}, "
            "expected a function"
        )
    return _function_reward(function, f"{custom.name} ({custom.path})", custom.reward_kwargs, config)


def built_in_reward(config: RewardConfig) -> FunctionReward:
    """The reward of built-in scorers, chosen by data_source and called with reward.reward_kwargs (such as method)."""
    kwargs = {key: value for key, value in config.reward_kwargs.items() if key not in PENALTY_KEYS}
    return _function_reward(score_row, "default_compute_score", kwargs, config)


def _function_reward(function: Any, name: str, kwargs: dict[str, Any], config: RewardConfig) -> FunctionReward:
    return FunctionReward(
        function,
        name,
        kwargs=kwargs,
        on_error=config.on_error,
        num_threads=config.num_workers,
        timeout_s=config.timeout_s,
        weights=config.weights,
    )
