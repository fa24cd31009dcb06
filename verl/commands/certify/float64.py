"""Keeps float64 models in float64: the norms and routers of `transformers` would round to float32."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.models.expert_parallel import are_divided


def keep_float64(model: Any) -> None:
    """Make casts to float32 inside the layers and norms of `model` leave float64 tensors unchanged.

    The certificate and the tests need it for the definition and for the engine: with the casts, two exact ways of
    computing the same value differ by 1e-7. Training does not call it.
    """
    if isinstance(model, PreTrainedModel) and not are_divided(model):
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer) or type(module).__name__.endswith("Norm"):
            module.__class__ = _without_rounding(type(module))  # type: ignore[arg-type]


@functools.cache
def _without_rounding(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass with another forward, so that copies of a module compute with their own weights."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _KeepFloat64():
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(forward)})


class _KeepFloat64(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float or (func in (Tensor.to, Tensor.type) and args[1:2] == (torch.float32,)):
                return args[0]
            if kwargs.get("dtype") == torch.float32:
                kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
