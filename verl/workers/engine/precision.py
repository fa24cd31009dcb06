"""Mixed precision without autocast: parameters have one dtype to train in and another to compute in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """The dtypes of one engine."""

    storage: torch.dtype  # of the parameters between passes; `compute` in an engine that does not train
    compute: torch.dtype  # of forward and backward
    reduce: torch.dtype  # of the sum of gradients over ranks
    buffers: torch.dtype | None  # of the model's buffers; None leaves them as they are
    wide_head: bool = False  # the head multiplies in float32 or wider, whatever `compute` is

    @classmethod
    def of(cls, config: FSDPEngineConfig, device: torch.device, trains: bool = True) -> "Precision":
        """From `mixed_precision` if it is set, otherwise `dtype`; sums are in float32 or wider."""
        configured = dict(config.mixed_precision or {})
        for name in configured:
            if name not in DTYPE_KEYS:
                raise ConfigError(f"mixed_precision.{name} is unknown; {did_you_mean(name, DTYPE_KEYS)}")
        storage = dtype_of(config.model_dtype, "model_dtype")
        compute_name = configured.get("param_dtype", config.dtype)
        if compute_name == "auto":
            compute = storage if device.type == "cpu" else torch.bfloat16
        else:
            compute = dtype_of(compute_name, "mixed_precision.param_dtype" if "param_dtype" in configured else "dtype")
        reduce_name, buffer_name = configured.get("reduce_dtype"), configured.get("buffer_dtype")
        reduce = torch.promote_types(storage, torch.float32)
        if reduce_name:
            reduce = dtype_of(reduce_name, "mixed_precision.reduce_dtype")
        if trains and torch.float16 in (storage, compute, reduce):
            raise ConfigError(
                "training in float16 is refused: a token's gradient is its share of a mini-batch, which float16 rounds "
                "to 0 without loss scaling (20 % off at 100,000 tokens); use dtype=bf16 with model_dtype=fp32"
            )
        return cls(
            storage if trains else compute,
            compute,
            reduce,
            dtype_of(buffer_name, "mixed_precision.buffer_dtype") if buffer_name else None,
            config.head_dtype == "float32",
        )

    def head_weights(self, head: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of the output head in the dtype that it multiplies in; gradients go to those of `head`."""
        if not self.wide_head:
            return head.weight, head.bias
        dtype = torch.promote_types(head.weight.dtype, torch.float32)
        return head.weight.to(dtype), None if head.bias is None else head.bias.to(dtype)

    def cast_buffers(self, model: nn.Module) -> None:
        """Cast the model's floating-point buffers to `buffers`, if it is set."""
        for module in model.modules() if self.buffers is not None else ():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    module._buffers[name] = buffer.to(self.buffers)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters to `dtype`: the trained parameters of an FSDP unit must have the same dtype.

    Adapters keep their dtype, which is float32 if the frozen weights are narrower.
    """
    has_lora = has_adapters(model)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not (has_lora and parameter.requires_grad):
            parameter.data = parameter.data.to(dtype)


class MasterWeights(ModelParameters):
    """Master weights of an unsharded model, in the dtype that the optimiser works in.

    If the model computes in the same dtype, there is no copy: `named_parameters` are the model's own. Otherwise the
    model's parameters are cast. Each micro-batch's gradient is added to the master's gradient in the master's dtype as
    soon as it is complete; `copy_to_model` rounds the trained values into the model. Buffers keep their dtype.
    """

    can_cast = True

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
        for parameter in self._model_parameters:  # gradients not yet added to their masters
            parameter.grad = None

    @contextmanager
    def cast_to(self, dtype: torch.dtype) -> Iterator[None]:
        """A context in which the model computes with its trained values cast to `dtype`."""
        masters = dict(zip(map(id, self._model_parameters), self._masters, strict=True))
        kept = [(p, p.data) for p in self._model.parameters() if p.is_floating_point()]
        try:
            for parameter, _ in kept:
                parameter.data = masters.get(id(parameter), parameter).data.to(dtype)
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data

    def to(self, device: torch.device) -> None:
        move_model(self._model, device)
        move_model(nn.ParameterList(self._masters), device)
        self._register_gradient_hooks()  # a move that swaps a parameter's contents loses its hooks

    def _cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        parameter.data = parameter.data.to(dtype)
        self._model_parameters.append(parameter)
        self._masters.append(master)
        return master

    def _register_gradient_hooks(self) -> None:
        """Register hooks that add the gradient of every cast parameter to its master's."""
        for parameter, master in zip(self._model_parameters, self._masters, strict=True):
            if parameter.requires_grad:
                parameter._post_accumulate_grad_hooks = None  # removes old hooks, which are never called again
                parameter.register_post_accumulate_grad_hook(_gradient_hook(master))


def other_dtype(dtype: torch.dtype, own: torch.dtype) -> torch.dtype:
    """`dtype`, or a wider one if `dtype` is the model's own: a second arithmetic, to see what rounding changes."""
    if dtype != own:
        return dtype
    return torch.float64 if own == torch.float32 else torch.float32


def _gradient_hook(master: nn.Parameter) -> Callable[[Tensor], None]:
    """A hook that moves a parameter's gradient into `master`'s."""

    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    return hook
