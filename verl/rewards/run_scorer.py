"""The function, scorers or model that score the answers of a run, and how a manager may have them called."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl.config import RewardConfig, RunConfig
from verl.config.reward import RM
from verl.rewards.base import Reward
from verl.rewards.calls import ManagerSource, ScorerSource
from verl.rewards.function_reward import CallRules, FunctionReward
from verl.rewards.managers import PENALTY_KEYS, ManagerOfClass
from verl.rewards.model_reward import MixedReward, ModelReward
from verl.rewards.scorers.sandbox_fusion import sandbox_arguments
from verl.rewards.scoring_child import KEY
from verl.rewards.scoring_pool import PoolChild, ScoringPool
from verl.rewards.scoring_process import LocalChild, RayChild
from verl.runtime.ray_objects import is_joined
from verl.utils.errors import ConfigError
from verl.utils.external_code import user_file


@dataclass(frozen=True)
class RunScorer:
    """The custom function if its path is set, else the reward model if there is one, else the built-in scorers.

    Beside a function or built-in scorers, a reward model gives the part `rm` of reward.weights.
    """

    config: RunConfig
    tokenizer: Any
    model: ModelReward | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)  # that a custom function gets with every call

    @property
    def is_model(self) -> bool:
        alone = self.config.reward.custom_reward_function.path is None and not self.other_weights
        return self.model is not None and alone

    @property
    def other_weights(self) -> dict[str, float]:
        """The weights of parts that no reward model gives."""
        return {name: weight for name, weight in self.config.reward.weights.items() if name != RM}

    def reward(self) -> Reward:
        """The values of what scores, by calls as `reward.*` sets them."""
        return self.model if self.model is not None and self.is_model else self.function_reward(self.rules)

    @property
    def rules(self) -> CallRules:
        return rules_of(self.config.reward)

    def function_reward(self, rules: CallRules, manager: ManagerOfClass | None = None) -> Reward:
        """The values of the custom function or the built-in scorers; ConfigError where a reward model scores."""
        self.check_is_function()
        made = None
        if manager is not None:
            made = ManagerSource(manager.path, manager.name, self.config, self.tokenizer, dict(self.model_kwargs))
        if self.model is None:
            return scoring_reward(self.config.reward, rules, self.model_kwargs, made)
        others = self.other_weights
        reward = scoring_reward(self.config.reward, replace(rules, weights=others), self.model_kwargs, made)
        return MixedReward(reward, self.model, bool(others))

    def check_is_function(self) -> None:
        """ConfigError where a reward model scores, which the manager cannot call."""
        if self.is_model:
            raise ConfigError(
                f"reward.reward_manager.name={self.config.reward.reward_manager.name} calls a function, but a reward "
                "model scores; set reward.custom_reward_function.path to a function that asks it, or leave the manager "
                "out"
            )


def scoring_reward(
    config: RewardConfig,
    rules: CallRules,
    model_kwargs: Mapping[str, Any] | None = None,
    manager: ManagerSource | None = None,
) -> FunctionReward:
    """The reward of the user's function, or of built-in scorers, called in processes of its own; ConfigError where it
    cannot be loaded."""
    custom, size, threads = config.custom_reward_function, 1, rules.num_threads
    path, name, kwargs = None, "default_compute_score", built_in_kwargs(config)
    if rules.processes:
        size, threads = threads, 1
        if kwargs.pop("concurrent_semaphore", None):  # which processes do not share
            size = min(size, config.sandbox_fusion.max_concurrent)
    if custom.path is not None:
        path, kwargs = str(user_file(custom.path, KEY) or custom.path), {**(model_kwargs or {}), **custom.reward_kwargs}
        name = f"{custom.name} ({custom.path})"
    source = ScorerSource(path, custom.name, kwargs, tuple(sys.path), threads, rules.timeout_s, rules.batched, manager)
    start = start_anywhere if rules.processes == "anywhere" else LocalChild.start
    pool = ScoringPool(source, start, size, rules.limits)
    if path is not None or manager is not None:
        pool.check(LocalChild.start)  # says now what is wrong with the function
    if manager is None:
        return FunctionReward(pool, name, rules)
    return FunctionReward(pool, f"{manager.name} of {name}", rules, lambda item: {"item": item})


async def start_anywhere(source: ScorerSource) -> PoolChild:
    """An actor of Ray where the run is on Ray, or a process of this machine."""
    return await (RayChild if is_joined() else LocalChild).start(source)


def built_in_kwargs(config: RewardConfig) -> dict[str, Any]:
    """The arguments of built-in scorers: reward.reward_kwargs, such as `method`, and those of their sandbox."""
    own = {key: value for key, value in config.reward_kwargs.items() if key not in PENALTY_KEYS}
    named = {"scorer": config.scorer} if config.scorer else {}
    return {**sandbox_arguments(config.sandbox_fusion), **named, **own}


def rules_of(config: RewardConfig) -> CallRules:
    """The rules of a run's calls; a manager changes some."""
    return CallRules(
        on_error=config.on_error,
        max_errors=config.max_errors if config.on_error == "count" else None,
        num_threads=config.num_workers,
        timeout_s=config.timeout_s,
        retries=config.retries,
        weights=config.weights,
    )
