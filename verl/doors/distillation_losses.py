"""The door for distillation losses written elsewhere, for padded (bs, T) tensors.

`register_distillation_loss` puts an adapter into the registry of `verl.algorithms.distillation`. The function sees one
row per sequence of a micro-batch, from its first sampled token to its end; it returns one loss per token, (bs, T), and
does not reduce, so that the micro-batch size cannot change the gradient. Nothing inside imports this module.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.algorithms import distillation
from verl.algorithms.policy_loss import TokenMetrics
from verl.config import ActorConfig, DistillationConfig, DistillationLossConfig
from verl.data.batch import Batch
from verl.doors.padded_adapters import PaddedView
from verl.utils.errors import ConfigError

PaddedDistillation = Callable[..., tuple[Tensor, Mapping[str, Any]]]


@dataclass(frozen=True)
class DistillationLossSettings:
    """The names of a loss, and what it is about: the teacher's top tokens, or the sampled token."""

    names: str | Sequence[str]
    use_topk: bool = False
    use_estimator: bool = False

    def __post_init__(self) -> None:
        if self.use_topk == self.use_estimator:
            raise ConfigError(
                f"DistillationLossSettings(names={self.names}): set one of use_topk=True (the teacher's top tokens) "
                "and use_estimator=True (the sampled token)"
            )


@dataclass(frozen=True)
class DistillationAdapter:
    """Runs a padded distillation loss on packed tokens."""

    name: str
    function: PaddedDistillation

    def __call__(
        self, logprobs: Tensor, teacher: Tensor, batch: Batch, config: DistillationLossConfig, actor: ActorConfig
    ) -> tuple[Tensor, TokenMetrics]:
        padded = PaddedView(batch)
        data = {"response_mask": padded.response_mask, "teacher_logprobs": _rows(padded, teacher)}
        output = {"log_probs" if logprobs.dim() == 1 else "topk_log_probs": _rows(padded, logprobs)}
        if logprobs.dim() == 1:
            data["teacher_logprobs"] = data["teacher_logprobs"].unsqueeze(-1)
        whole = DistillationConfig(enabled=True, distillation_loss=config)
        result = self.function(config=actor, distillation_config=whole, model_output=output, data=data)
        losses = result[0] if isinstance(result, tuple) and len(result) == 2 else None
        if not isinstance(losses, Tensor) or losses.shape != padded.response_mask.shape:
            raise ConfigError(
                f"distillation loss {self.name!r} must return (losses, metrics) with one loss per token, "
                f"{tuple(padded.response_mask.shape)}; it returned "
                f"{type(result).__name__ if losses is None else tuple(getattr(losses, 'shape', ()))}"
            )
        packed = padded.to_packed(losses)
        numbers = {str(key).removeprefix("distillation/"): packed.new_tensor(float(v)) for key, v in result[1].items()}
        return packed, {key: number.expand_as(packed) for key, number in numbers.items()}


def _rows(padded: PaddedView, column: Tensor) -> Tensor:
    """(T,) or (T, k) -> (N, W) or (N, W, k)."""
    if column.dim() == 1:
        return padded.to_padded(column)
    return torch.stack([padded.to_padded(part) for part in column.unbind(1)], -1)


def register_distillation_loss(
    settings: DistillationLossSettings,
) -> Callable[[PaddedDistillation], PaddedDistillation]:
    """Decorator: `fn(config, distillation_config, model_output, data) -> (losses (bs, T), metrics)`, passed by name.

    `config` is the actor's section. With `use_estimator`: model_output["log_probs"] (bs, T), data["teacher_logprobs"]
    (bs, T, 1). With `use_topk`: model_output["topk_log_probs"] and data["teacher_logprobs"] (bs, T, k), of the same
    tokens. data["response_mask"] is 0 on tool tokens and padding. Metrics are numbers by name.
    """
    names = [settings.names] if isinstance(settings.names, str) else list(settings.names)

    def add(function: PaddedDistillation) -> PaddedDistillation:
        for name in names:
            adapter = DistillationAdapter(name, function)
            distillation.register_distillation_loss(name, settings.use_topk, per_token=False)(adapter)
        return function

    return add
