"""What scores the answers of a run, and how a manager may have it called."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from verl.config import RewardConfig, RunConfig
from verl.config.reward import RM
from verl.rewards.base import Reward
from verl.rewards.function_reward import CallRules, FunctionReward
from verl.rewards.managers import PENALTY_KEYS
from verl.rewards.model_reward import MixedReward, ModelReward
from verl.rewards.process_state import ProcessGuard
from verl.rewards.scorer_lookup import score_row
from verl.rewards.scorers.sandbox_fusion import sandbox_arguments
from verl.rewards.scoring_child import ScorerSource
from verl.rewards.scoring_process import Child, LocalChild, ProcessFunction, RayChild
from verl.runtime.ray_objects import is_joined
from verl.utils.errors import ConfigError
from verl.utils.external_code import load_object, user_file


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
        """Its values, by calls as `reward.*` sets them."""
        return self.model if self.model is not None and self.is_model else self.function_reward(self.rules)

    @property
    def rules(self) -> CallRules:
        return rules_of(self.config.reward)

    def function_reward(self, rules: CallRules) -> Reward:
        """The values of the custom function or the built-in scorers; ConfigError where a reward model scores."""
        self.check_is_function()
        function, name, kwargs = self.function()
        return self.beside_model(lambda rules: FunctionReward(function, name, kwargs, rules), rules)

    def beside_model(self, make: Callable[[CallRules], FunctionReward], rules: CallRules) -> Reward:
        """What `make` builds by `rules`, with the part of a reward model where there is one."""
        if self.model is None:
            return make(rules)
        others = self.other_weights
        return MixedReward(make(replace(rules, weights=others)), self.model, bool(others))

    def process_reward(self, may_use_ray: bool) -> Reward:
        """The values of the function in `reward.num_workers` processes of its own, or actors of the Ray of the run."""
        self.check_is_function()
        config, custom = self.config.reward, self.config.reward.custom_reward_function
        size, name, kwargs = config.num_workers, "default_compute_score", built_in_kwargs(config)
        if kwargs.pop("concurrent_semaphore", None):  # which processes do not share: each makes one call at a time
            size = min(size, config.sandbox_fusion.max_concurrent)
        if custom.path is not None:
            name, kwargs = f"{custom.name} ({custom.path})", {**self.model_kwargs, **custom.reward_kwargs}
        path = user_file(custom.path, "reward.custom_reward_function") or custom.path
        source = ScorerSource(path and str(path), custom.name, dict(kwargs), tuple(sys.path))
        first = LocalChild(source)  # says now what is wrong with the function

        def start() -> Child:
            return RayChild(source) if may_use_ray and is_joined() else LocalChild(source)

        if may_use_ray:
            first.kill()
        function = ProcessFunction(start, size, config.timeout_s, None if may_use_ray else first)
        rules = replace(self.rules, num_threads=size, timeout_s=None)
        return self.beside_model(lambda rules: FunctionReward(function, name, rules=rules), rules)

    def check_is_function(self) -> None:
        """ConfigError where a reward model scores, which the manager cannot call."""
        if self.is_model:
            raise ConfigError(
                f"reward.reward_manager.name={self.config.reward.reward_manager.name} calls a function, but a reward "
                "model scores; set reward.custom_reward_function.path to a function that asks it, or leave the manager "
                "out"
            )

    def function(self) -> tuple[Callable[..., Any], str, dict[str, Any]]:
        """The function, its name in messages, and the keywords that it gets with every call."""
        config = self.config.reward
        if config.custom_reward_function.path is None:
            return score_row, "default_compute_score", built_in_kwargs(config)
        function, name, kwargs = load_custom(config)
        return function, name, {**self.model_kwargs, **kwargs}


def load_custom(config: RewardConfig) -> tuple[Callable[..., Any], str, dict[str, Any]]:
    """The user's function, loaded from its file, its name in messages, and its reward_kwargs."""
    custom = config.custom_reward_function
    with ProcessGuard(f"the import of {custom.path}").importing():
        function = load_object(custom.path or "", custom.name, "reward.custom_reward_function")
    if not callable(function):
        raise ConfigError(
            f"reward.custom_reward_function.name={custom.name!r} in {custom.path} is {type(function).__name__}, "
            "expected a function"
        )
    return function, f"{custom.name} ({custom.path})", custom.reward_kwargs


def built_in_kwargs(config: RewardConfig) -> dict[str, Any]:
    """What built-in scorers get of reward.reward_kwargs, such as `method`, and those of programs of their sandbox."""
    own = {key: value for key, value in config.reward_kwargs.items() if key not in PENALTY_KEYS}
    return {**sandbox_arguments(config.sandbox_fusion), **own}


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
