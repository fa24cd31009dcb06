"""Parameters trained in one type and computed with in another, without autocast."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl.config import FSDPEngineConfig
from verl.models.device_moves import move_model
from verl.models.load import dtype_of
from verl.models.lora import has_adapters
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean
from verl.workers.engine.model_parameters import ModelParameters

DTYPE_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True)
class Precision:
    """The types of one engine."""

    storage: torch.dtype  # of the parameters between passes; those not trained are held as they are computed with
    compute: torch.dtype  # of forward and backward
    reduce: torch.dtype  # in which gradients are summed over ranks
    buffers: torch.dtype | None  # of the model's buffers; None leaves them as they are

    @classmethod
    def of(cls, config: FSDPEngineConfig, device: torch.device, trains: bool = True) -> "Precision":
        """`mixed_precision` where it is set, otherwise `dtype`; sums are in float32 or better."""
        given_dtypes = dict(config.mixed_precision or {})
        for name in given_dtypes:
            if name not in DTYPE_KEYS:
                raise ConfigError(f"mixed_precision.{name} is unknown; {did_you_mean(name, DTYPE_KEYS)}")
        storage = dtype_of(config.model_dtype, "model_dtype")
        computed = given_dtypes.get("param_dtype", config.dtype)
        if computed == "auto":
            compute = storage if device.type == "cpu" else torch.bfloat16
        else:
            compute = dtype_of(computed, "mixed_precision.param_dtype" if "param_dtype" in given_dtypes else "dtype")
        summed, buffers = given_dtypes.get("reduce_dtype"), given_dtypes.get("buffer_dtype")
        reduce = (
            dtype_of(summed, "mixed_precision.reduce_dtype") if summed else torch.promote_types(storage, torch.float32)
        )
        if trains and torch.float16 in (storage, compute, reduce):
            raise ConfigError(
                "training in float16 is refused: a token's gradient is its share of a mini-batch, which float16 rounds "
                "to 0 without loss scaling (20 % off at 100,000 tokens); use dtype=bf16 with model_dtype=fp32"
            )
        return cls(
            storage if trains else compute,
            compute,
            reduce,
            dtype_of(buffers, "mixed_precision.buffer_dtype") if buffers else None,
        )

    def cast_buffers(self, model: nn.Module) -> None:
        """Give the model's floating-point buffers the type asked for."""
        for module in model.modules() if self.buffers is not None else ():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(self.buffers)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Every floating-point parameter in the type it is trained in: the trained ones of a unit must agree.

    Adapters keep theirs, which is float32 where the frozen weights are narrower.
    """
    adapted = has_adapters(model)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not (adapted and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)


class MasterWeights(ModelParameters):
    """The trained copy of a model's parameters, in the type the optimiser works in; the whole model on one rank.

    Where that is the type the model computes in, there is no copy: `parameters` are the model's own. Otherwise the
    model's parameters are cast; the gradient of every micro-batch is added to the master's in the master's type as soon
    as it is complete, and `copy_to_model` rounds the trained values into the model. Buffers keep their type.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype):
        self._model = model
        self._model_parameters: list[nn.Parameter] = []
        self._masters: list[nn.Parameter] = []
        self.named_parameters = []
        for name, parameter in model.named_parameters():
            cast = parameter.is_floating_point() and parameter.dtype != compute_dtype
            self.named_parameters.append((name, self._cast(parameter, compute_dtype) if cast else parameter))
        self._register_gradient_hooks()

    @property
    def has_master_copies(self) -> bool:
        return bool(self._masters)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the trained values into the model."""
        if self._masters:
            torch._foreach_copy_([p.data for p in self._model_parameters], [m.data for m in self._masters])

    def zero_grad(self) -> None:
        super().zero_grad()
        for parameter in self._model_parameters:  # one that had not reached its master yet
            parameter.grad = None

    def to(self, device: torch.device) -> None:
        move_model(self._model, device)
        move_model(nn.ParameterList(self._masters), device)
        self._register_gradient_hooks()  # hooks stay behind where a move swaps what is inside a parameter

    def _cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        parameter.data = parameter.data.to(dtype)
        self._model_parameters.append(parameter)
        self._masters.append(master)
        return master

    def _register_gradient_hooks(self) -> None:
        """Have the gradient of every cast parameter added to its master's."""
        for parameter, master in zip(self._model_parameters, self._masters, strict=True):
            if parameter.requires_grad:
                parameter._post_accumulate_grad_hooks = None  # or a new one joins those that are never called again
                parameter.register_post_accumulate_grad_hook(_add_gradient_to(master))


def _add_gradient_to(master: nn.Parameter):
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    return hook
