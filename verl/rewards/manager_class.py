"""Reward managers that are classes of a user's own: their base class, and the reward that calls one."""

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from verl.rewards.base import Reward
from verl.rewards.function_reward import CallRules, FunctionReward
from verl.rewards.managers import REWARD_MANAGERS
from verl.rewards.one_answer import OneAnswer
from verl.rewards.run_scorer import RunScorer
from verl.utils.errors import ConfigError

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
        REWARD_MANAGERS.register(name)(ManagerOfClass(cls))
        return cls

    return add


@dataclass(frozen=True)
class ManagerOfClass:
    """The reward manager whose instances score the answers of a run."""

    cls: type[RewardManagerBase]

    def __call__(self, scorer: RunScorer) -> Reward:
        scorer.check_is_function()
        function, name, kwargs = scorer.function()
        self.cls.init_class(scorer.config, scorer.tokenizer)
        manager = self.cls(scorer.config, scorer.tokenizer, with_keywords(function, kwargs), **self._asked_for(scorer))
        own_tokens = any("assemble_rm_scores" in vars(cls) for cls in self.cls.mro()[: -len(RewardManagerBase.mro())])

        async def run_single(data: OneAnswer) -> dict[str, Any]:
            result = await manager.run_single(data)
            return read_result(result, data, self.cls.assemble_rm_scores if own_tokens else None)

        def reward(rules: CallRules) -> FunctionReward:
            name_of_both = f"{self.cls.__name__} of {name}"
            return FunctionReward(
                run_single, name_of_both, rules=rules, arguments=lambda item: {"data": OneAnswer(item)}
            )

        return scorer.beside_model(reward, scorer.rules)

    def _asked_for(self, scorer: RunScorer) -> dict[str, Any]:
        """What a served reward model brings, where the constructor has parameters for it."""
        parameters = inspect.signature(self.cls).parameters
        return {name: value for name, value in scorer.model_kwargs.items() if name in parameters}


def manager_of_class(cls: Any, where: str) -> ManagerOfClass:
    """The manager of a class from a user's file; ConfigError where it derives from something else."""
    if not (isinstance(cls, type) and issubclass(cls, RewardManagerBase)):
        raise ConfigError(
            f"{where} is {cls!r:.80}, not a class that derives from "
            "verl.experimental.reward_loop.reward_manager.RewardManagerBase (docs/own_reward_manager.md)"
        )
    return ManagerOfClass(cls)


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
    """What `run_single` returned, as a reward function returns it; ValueError where it cannot be read."""
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
