"""Policy losses by name: what each needs, and how a configuration chooses one.

Shapes: M tokens of a micro-batch, or of a slice of one; T tokens of a mini-batch. No loss reduces over tokens:
aggregation is done by the column `loss_weights` (see aggregation.py). Import from losses.py, which registers the
built-in ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.config import ActorConfig
from verl.config.algorithm import LOSS_AGG_MODES
from verl.data.batch import Batch
from verl.utils.errors import ConfigError
from verl.utils.registry import Registry
from verl.utils.suggest import did_you_mean

TokenMetrics = dict[str, Tensor]
PolicyLossFunction = Callable[[Tensor, Tensor, Tensor, Batch, ActorConfig], tuple[Tensor, TokenMetrics]]
Reduction = Callable[[Tensor, Tensor, str], Tensor]  # (losses, mask, loss_agg_mode) -> scalar
# (mini-batch, config, a uniform random number per token (T,)) -> which tokens are chosen (T,) bool
TokenChoice = Callable[[Batch, ActorConfig, Tensor], Tensor]

LOG_RATIO_LIMIT = 20.0  # nats; e^20 is far outside every clip range and still finite in float32


class ReducingLoss(ABC):
    """A `PolicyLossFunction` around a function that reduces by itself. Shapes: N rows, W the longest response."""

    @abstractmethod
    def ignores_weights(self, config: ActorConfig) -> bool:
        """Whether the gradient is the same without and with importance weights."""

    @abstractmethod
    def reduced(self, reduce: Reduction, config: ActorConfig, columns: dict[str, Tensor]) -> Tensor:
        """The scalar of padded `columns` (N, W): log_prob, old, advantages, mask."""


def accept_any_config(config: ActorConfig) -> None:
    """Accepts every configuration."""


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss: `function(logprobs, old_logprobs, advantages, batch, config)`, all (M,)."""

    function: PolicyLossFunction
    per_token: bool = True
    check: Callable[[ActorConfig], None] = accept_any_config
    columns: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    choose_tokens: TokenChoice | None = None
    aggregation: str | None = None
    multiplies_weights: bool = False

    def ignores_weights(self, config: ActorConfig) -> bool:
        """Whether a loss that was to multiply by the importance weights itself shows that it does not."""
        return isinstance(self.function, ReducingLoss) and self.function.ignores_weights(config)


POLICY_LOSSES: Registry[PolicyLoss] = Registry("policy loss")


def register_policy_loss(
    name: str,
    per_token: bool = True,
    check: Callable[[ActorConfig], None] = accept_any_config,
    columns: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
    choose_tokens: TokenChoice | None = None,
    aggregation: str | None = None,
    multiplies_weights: bool = False,
) -> Callable[[PolicyLossFunction], PolicyLossFunction]:
    """Decorator that makes a loss selectable as `actor.policy_loss.loss_mode=<name>`.

    `per_token=False`: its losses depend on other tokens of the sequence; it gets whole sequences, which
    `batch.cu_seqlens` bounds. `check` raises ConfigError, before the first step, where it cannot be used.
    `columns` are what it reads in `batch` beside `loss_mask`; a column of one value per sequence is repeated on the
    tokens of each. `outputs` are outputs of the model beside `logprobs`, which are in `batch` under their names, with
    gradient: entropy, sum_pi_squared. Any but entropy runs the head once more and recomputes logits in the backward.
    `choose_tokens` is called once per mini-batch, before it is cut, with its column `current_logprobs`; the result is
    the column `chosen_tokens`. `aggregation` replaces `actor.loss_agg_mode`, for a loss that is defined with one.
    `multiplies_weights`: it multiplies its losses by the column `rollout_is_weights` itself, where there is one.
    """
    if aggregation is not None and aggregation not in LOSS_AGG_MODES:
        raise ConfigError(
            f"policy loss {name!r}: aggregation={aggregation!r}; {did_you_mean(aggregation, LOSS_AGG_MODES)}"
        )

    def add(function: PolicyLossFunction) -> PolicyLossFunction:
        flags = (outputs, choose_tokens, aggregation, multiplies_weights)
        POLICY_LOSSES.register(name)(PolicyLoss(function, per_token, check, columns, *flags))
        return function

    return add


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss registered as `name`; ConfigError for an unknown one."""
    return POLICY_LOSSES.get(name)


def limited_log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """log(p / p_old), at most ±20 nats."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def losses_per_token(name: str, returned: Any, logprobs: Tensor) -> tuple[Tensor, TokenMetrics]:
    """The values of the loss `name`; ConfigError unless they are one per token, since broadcasting would hide it."""
    losses = returned[0] if isinstance(returned, tuple) and len(returned) == 2 else None
    if not isinstance(losses, Tensor) or losses.shape != logprobs.shape:
        received = (
            type(returned).__name__ if losses is None else f"losses of shape {tuple(getattr(losses, 'shape', ()))}"
        )
        raise ConfigError(
            f"{name} returned {received}; it must return (losses, metrics) with one loss per token, "
            f"{tuple(logprobs.shape)}: the trainer reduces, by actor.loss_agg_mode"
        )
    return losses, returned[1]


def aggregation_mode(config: ActorConfig) -> str:
    """How the losses of the actor are aggregated: as its policy loss is defined, or by `loss_agg_mode`."""
    return get_policy_loss(config.policy_loss.loss_mode).aggregation or config.loss_agg_mode


def with_chosen_tokens(batch: Batch, config: ActorConfig, draws: Tensor) -> Batch:
    """The mini-batch with `chosen_tokens` (T,), if its loss chooses tokens; `draws` (T,) are uniform in [0, 1)."""
    choose = get_policy_loss(config.policy_loss.loss_mode).choose_tokens
    if choose is None:
        return batch
    with torch.no_grad():
        return batch.with_columns(chosen_tokens=choose(batch, config, draws) & batch["loss_mask"])


def detach_metrics(metrics: TokenMetrics) -> TokenMetrics:
    """The same numbers detached from the autograd graph, booleans as 0 and 1."""
    return {name: (m.float() if m.dtype == torch.bool else m).detach() for name, m in metrics.items()}
