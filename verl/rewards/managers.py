"""Reward managers, by name: how a scorer is called, or how its value is changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl.config import RewardConfig, RunConfig
from verl.config.reward import RewardManagerConfig
from verl.rewards.base import Reward, RewardInput, Score
from verl.rewards.call_limits import limits_of_process
from verl.utils.errors import ConfigError
from verl.utils.external_code import check_user_object
from verl.utils.registry import Registry
from verl.utils.suggest import did_you_mean

if TYPE_CHECKING:
    from verl.rewards.run_scorer import RunScorer

REWARD_MANAGERS: Registry[RewardManager | ManagerOfClass] = Registry("reward.reward_manager.name")

MODULE, NAME = "reward.reward_manager.module", "reward.reward_manager.name"  # keys, in messages
PENALTY_KEYS = ("overlong_buffer_cfg", "max_resp_len")  # keys of reward.reward_kwargs that are not passed to scorers


@dataclass(frozen=True)
class RewardManager:
    """How the scorer of a run is called, or how its value is changed."""

    rules: Callable[[RunConfig], dict[str, Any]] | None = None  # of calls, other than the run's; it calls a function
    check: Callable[[RewardConfig], None] = lambda config: None  # ConfigError where something is missing
    around: Callable[[RunConfig, Reward], Reward] = lambda config, reward: reward

    def __call__(self, scorer: RunScorer) -> Reward:
        config = scorer.config
        self.check(config.reward)
        if self.rules is None:
            return self.around(config, scorer.reward())
        return self.around(config, scorer.function_reward(replace(scorer.rules, **self.rules(config))))


def find_reward_manager(config: RewardManagerConfig) -> RewardManager | ManagerOfClass:
    """The manager that `reward.reward_manager` names; ConfigError when there is none."""
    if config.source == "register":
        return REWARD_MANAGERS.get(config.name)
    return ManagerOfClass(module_path(config), config.name)


def check_reward_manager(config: RewardManagerConfig) -> None:
    """ConfigError where the name is unknown, or the file of a class is not there or lacks it. Runs nothing."""
    if config.source == "register":
        find_reward_manager(config)
    else:
        check_user_object(module_path(config), config.name, MODULE, NAME)


def module_path(config: RewardManagerConfig) -> str:
    """The file of a user's manager; ConfigError without one."""
    if config.module.path is None:
        raise ConfigError(
            "reward.reward_manager.source=importlib needs the class's file, reward.reward_manager.module.path=FILE, "
            "beside its name"
        )
    return config.module.path


@dataclass(frozen=True)
class ManagerOfClass:
    """The reward manager of a user's class, of which the scoring process makes an instance."""

    path: str
    name: str

    def __call__(self, scorer: RunScorer) -> Reward:
        return scorer.function_reward(scorer.rules, self)


def check_parts(config: RewardConfig) -> None:
    """ConfigError where the reward has no named parts."""
    if not config.weights:
        raise ConfigError(
            "reward.reward_manager.name=gdpo needs the parts of the reward: reward.weights.NAME=WEIGHT for each number "
            "that the reward function returns, or algorithm.gdpo_reward_keys=[NAME,...]"
        )


def check_own_function(config: RewardConfig) -> None:
    """ConfigError where built-in scorers score, which take one answer."""
    if config.custom_reward_function.path is None:
        raise ConfigError(
            "reward.reward_manager.name=batch calls a function of your own with lists; name it by "
            "reward.custom_reward_function.path, or leave the manager out for the built-in scorers"
        )


def check_limit(config: RewardConfig) -> None:
    """ConfigError where a call has no limit."""
    if config.timeout_s is None:
        raise ConfigError(
            "reward.reward_manager.name=prime needs the limit of a call: reward.timeout_s=SECONDS; without one, use "
            "reward.reward_manager.name=remote"
        )


def with_overlong_penalty(config: RunConfig, reward: Reward) -> Reward:
    """`reward` minus a penalty for answers that use the last part of the length budget."""
    kwargs = config.reward.reward_kwargs
    buffer = read_overlong_buffer(kwargs.get("overlong_buffer_cfg") or {})
    if not buffer.enable:
        return reward
    max_length = kwargs.get("max_resp_len") or config.data.max_response_length
    if not 0 < buffer.len <= max_length:
        raise ConfigError(
            f"reward.reward_kwargs.overlong_buffer_cfg.len={buffer.len} must be between 1 and the longest answer, "
            f"max_resp_len={max_length} tokens"
        )
    return OverlongPenalty(reward, buffer, max_length)


@dataclass(frozen=True)
class OverlongBuffer:
    """Settings under `reward.reward_kwargs.overlong_buffer_cfg`."""

    enable: bool = False
    len: int = 0  # tokens before max_resp_len in which the penalty grows
    penalty_factor: float = 1.0  # penalty at max_resp_len
    log: bool = False  # store overlong_reward and overlong per answer


def read_overlong_buffer(settings: Mapping[str, Any]) -> OverlongBuffer:
    """`settings` as an OverlongBuffer; ConfigError for an unknown key."""
    known = OverlongBuffer.__dataclass_fields__
    for key in settings:
        if key not in known:
            raise ConfigError(f"unknown key reward.reward_kwargs.overlong_buffer_cfg.{key}; {did_you_mean(key, known)}")
    return OverlongBuffer(**settings)


class OverlongPenalty:
    """Soft over-long punishment: 0 up to max_length - len tokens, then linear to -penalty_factor at max_length.

    Source: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025), equation 13.
    """

    def __init__(self, reward: Reward, buffer: OverlongBuffer, max_length: int):
        self._reward, self._buffer, self._max_length = reward, buffer, max_length
        self.is_async, self.exchange_generators = reward.is_async, reward.exchange_generators

    async def score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        scores = await self._reward.score(inputs)
        return [self._penalized(item, score) for item, score in zip(inputs, scores, strict=True)]

    def _penalized(self, item: RewardInput, score: Score) -> Score:
        if score.value is None:
            return score
        if item.response_length is None:
            raise ConfigError(
                "reward.reward_manager.name=dapo needs the answer's length in tokens, which is missing here"
            )
        penalty = self.penalty(item.response_length)
        extra = score.extra
        if self._buffer.log:
            extra = {**extra, "overlong_reward": penalty, "overlong": penalty < 0}
        return replace(score, value=score.value + penalty, extra=extra)

    def penalty(self, length: int) -> float:
        """Penalty, at most 0, of an answer of `length` tokens."""
        excess = length - (self._max_length - self._buffer.len)
        return min(-excess / self._buffer.len * self._buffer.penalty_factor, 0.0)


def _rate_limits(config: RunConfig) -> dict[str, Any]:
    return {"limits": limits_of_process(config.reward), "num_threads": config.reward.max_concurrent}


def _anywhere(config: RunConfig) -> dict[str, Any]:
    return {"processes": "anywhere" if config.trainer.runtime in ("ray", "auto") else "here"}


MANAGERS = {
    "naive": RewardManager(),  # the scorer's value, unchanged
    "gdpo": RewardManager(check=check_parts),  # the same; the estimator gdpo normalises its parts one by one
    "dapo": RewardManager(around=with_overlong_penalty),
    "rate_limited": RewardManager(_rate_limits),  # reward.max_concurrent, max_rpm, max_tpm; one line per process
    "limit": RewardManager(_rate_limits),  # its name in published documentation
    "batch": RewardManager(lambda config: {"batched": True}, check_own_function),  # all answers to a prompt in one call
    "remote": RewardManager(_anywhere),  # in processes of its own; in actors of Ray where the run is on Ray
    "prime": RewardManager(lambda config: {"processes": "here"}, check_limit),  # a limit for each call
}
for _name, _manager in MANAGERS.items():
    REWARD_MANAGERS.register(_name)(_manager)
