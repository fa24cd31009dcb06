"""Reward managers that are classes of a user's own: their base class, and the reward that calls one."""

import asyncio
import functools
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.rewards.base import RewardInput
from verl.rewards.calls import ManagerSource
from verl.rewards.managers import MODULE, NAME, REWARD_MANAGERS, ManagerOfClass
from verl.rewards.single_sequence_batch import OneAnswer
from verl.utils.errors import ConfigError
from verl.utils.external_code import load_object

M = TypeVar("M", bound="type[RewardManagerBase]")


class RewardManagerBase(ABC):
    """Base class of reward managers: `run_single` scores one answer, which it gets as a `OneAnswer`."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Callable[..., Any]):
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop in which `run_single` runs; its executor has reward.num_workers threads."""
        return asyncio.get_running_loop()

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Called before an instance is made."""
        del config, tokenizer  # a subclass may prepare what its instances share

    @abstractmethod
    async def run_single(self, data: OneAnswer) -> dict[str, Any]:
        """`{"reward_score": number, "reward_extra_info": {...}}` of an answer; the latter are columns for logs."""

    @classmethod
    def assemble_rm_scores(cls, data: OneAnswer, scores: Sequence[float]) -> Tensor:
        """Rewards of the tokens, (1, R): the score at the last one, and 0 elsewhere."""
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[0, -1:] = scores[0]
        return rewards


def register(name: str) -> Callable[[M], M]:
    """Decorator: `reward.reward_manager.name=name` takes this class. Name its module in VERL_USE_EXTERNAL_MODULES."""

    def add(cls: M) -> M:
        file = getattr(sys.modules[cls.__module__], "__file__", None)
        path = file if file and cls.__module__.startswith("verl_user_") else f"pkg://{cls.__module__}"
        REWARD_MANAGERS.register(name)(ManagerOfClass(path, cls.__qualname__))
        return cls

    return add


def scorer_of(
    manager: ManagerSource, function: Callable[..., Any], kwargs: Mapping[str, Any]
) -> Callable[..., Awaitable[dict[str, Any]]]:
    """The `run_single` of an instance, which gets an `item` and returns what a reward function does; ConfigError where
    the class derives from something else."""
    cls = load_object(manager.path, manager.name, MODULE, NAME)
    if not (isinstance(cls, type) and issubclass(cls, RewardManagerBase)):
        raise ConfigError(
            f"{NAME}={manager.name!r} in {manager.path} is {cls!r:.80}, not a class that derives from "
            "verl.experimental.reward_loop.reward_manager.RewardManagerBase (docs/rewards/own_reward_manager.md)"
        )
    cls.init_class(manager.config, manager.tokenizer)
    parameters = inspect.signature(cls).parameters
    asked_for = {name: value for name, value in manager.keywords.items() if name in parameters}
    made = cls(manager.config, manager.tokenizer, with_keywords(function, kwargs), **asked_for)
    own_tokens = any("assemble_rm_scores" in vars(one) for one in cls.mro()[: -len(RewardManagerBase.mro())])

    async def run_single(item: RewardInput) -> dict[str, Any]:
        data = OneAnswer(item)
        return read_result(await made.run_single(data), data, cls.assemble_rm_scores if own_tokens else None)

    return run_single


def with_keywords(function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """`function`, which gets `kwargs` with every call: they win over those of the call. Async stays async."""
    if not kwargs:
        return function
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **given: Any) -> Any:
            return await function(*args, **{**given, **kwargs})

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        return function(*args, **{**given, **kwargs})

    return call


def read_result(
    result: Any, data: OneAnswer, assemble: Callable[[OneAnswer, Sequence[float]], Tensor] | None
) -> dict[str, Any]:
    """The result of `run_single`, as a reward function returns it; ValueError where it cannot be read."""
    if not isinstance(result, Mapping) or "reward_score" not in result:
        found = list(result) if isinstance(result, Mapping) else type(result).__name__
        raise ValueError(
            f"run_single returned {found}; return {{'reward_score': number, 'reward_extra_info': {{...}}}}"
        )
    score = result["reward_score"]
    if assemble is not None:
        tokens = assemble(data, [score]).reshape(-1)
        if tokens.numel() != data.batch["responses"].numel() or bool(tokens[:-1].any()):
            raise ValueError(
                f"assemble_rm_scores returned rewards of {int((tokens != 0).sum())} of {tokens.numel()} tokens; here "
                "an answer has one reward, at its last token"
            )
        score = tokens[-1].item()
    return {**(result.get("reward_extra_info") or {}), "score": score}
