"""Advantage estimators by name: what each needs, and how a configuration chooses one.

Shapes: N sequences, T packed tokens, M sampled tokens (loss_mask True). An estimator is a plain function
`fn(batch, config) -> (advantages (T,), returns (T,))`, zero where loss_mask is False. It receives the whole batch of a
step, so group and batch statistics need no collectives. Import from advantages.py, which registers the built-in ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from verl.config import AlgorithmConfig
from verl.data.batch import Batch
from verl.utils.errors import ConfigError
from verl.utils.registry import Registry

AdvantageFunction = Callable[[Batch, AlgorithmConfig], tuple[Tensor, Tensor]]
F = TypeVar("F", bound=AdvantageFunction)  # it may have more arguments, with defaults
Columns = tuple[str, ...] | Callable[[AlgorithmConfig], tuple[str, ...]]


def accept_any_algorithm(config: AlgorithmConfig) -> None:
    """Accepts every configuration."""


@dataclass(frozen=True)
class Advantage:
    """A registered estimator, and what it needs of a batch beyond `token_rewards`, `loss_mask` and `group_ids`."""

    function: AdvantageFunction
    check: Callable[[AlgorithmConfig], None] = accept_any_algorithm
    columns: Columns = ()
    outputs: tuple[str, ...] = ()

    def columns_for(self, config: AlgorithmConfig) -> tuple[str, ...]:
        """The columns that it reads with this configuration."""
        return self.columns(config) if callable(self.columns) else self.columns

    def needs_logprob_pass(self, config: AlgorithmConfig) -> bool:
        """Whether the policy must run on the batch before advantages are computed."""
        return bool(self.outputs) or bool({"old_logprobs", "entropy"} & set(self.columns_for(config)))


ADVANTAGES: Registry[Advantage] = Registry("advantage estimator")


def register_advantage(
    name: str,
    check: Callable[[AlgorithmConfig], None] = accept_any_algorithm,
    columns: Columns = (),
    outputs: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Decorator that makes an estimator selectable as `algorithm.adv_estimator=<name>`.

    `check` raises ConfigError, before the first step, for a configuration that it cannot use.
    `columns` are batch columns that it reads (or a function of the configuration that gives them): any column of
    `verl.data.columns.COLUMNS`, such as values, old_logprobs, rollout_logprobs or reward_baselines, and
    `reward_parts.NAME` (N,), the part NAME of each reward. `outputs` are outputs of the policy before the update, which
    become columns (T,): entropy, sum_pi_squared (the sum of the squared probabilities of all tokens). The trainer
    computes only what is asked for.
    """

    def add(function: F) -> F:
        ADVANTAGES.register(name)(Advantage(function, check, columns, outputs))
        return function

    return add


def get_advantage(name: str) -> Advantage:
    """The estimator registered as `name`; ConfigError for an unknown one."""
    return ADVANTAGES.get(name)


def check_advantage(config: AlgorithmConfig) -> None:
    """ConfigError where `config.adv_estimator` is unknown, or cannot be used with this configuration."""
    get_advantage(config.adv_estimator).check(config)


def compute_advantages(batch: Batch, config: AlgorithmConfig) -> Batch:
    """The batch with `advantages` and `returns` (T,) of `config.adv_estimator`."""
    with torch.no_grad():
        result = get_advantage(config.adv_estimator).function(batch, config)
    expected = (batch.num_tokens,)
    if not isinstance(result, tuple) or [getattr(column, "shape", None) for column in result] != [expected] * 2:
        seen = [tuple(getattr(column, "shape", ())) for column in result] if isinstance(result, tuple) else type(result)
        raise ConfigError(
            f"advantage estimator {config.adv_estimator!r} returned {seen}; it must return (advantages, returns), "
            f"each of one number per token of the packed batch, {expected}"
        )
    advantages, returns = result
    return batch.with_columns(advantages=advantages, returns=returns)
