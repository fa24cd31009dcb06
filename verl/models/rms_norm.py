"""The RMS norms of `transformers` as one fused autograd function.

The library computes a norm with six elementwise operations and its gradient with a dozen more: on a CPU a tenth of a
small model's update. Here the gradient is the closed form; the result differs by rounding only.
"""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from verl.models.fastest import fastest
from verl.plugin.library_versions import multiplied

FUSED_DTYPES = (torch.float32, torch.float64)  # for lower precision the class computes in float32 and rounds itself


TIMED_ELEMENTS = 1 << 19


def use_fused_rms_norm(model: nn.Module) -> None:
    """Make the plain RMS norms of `model` use `FusedRMSNorm` if that is faster here; other norms stay unchanged."""
    norms = [module for module in model.modules() if is_plain_rms_norm(type(module))]
    widest: Any = max(norms, key=lambda norm: norm.weight.numel(), default=None)
    if widest is not None and fused_norm_is_faster(type(widest), widest.weight.numel()):
        for norm in norms:
            norm.__class__ = _with_fused_norm(type(norm))


def fused_norm_is_faster(kind: type[nn.Module], size: int) -> bool:
    """Whether `FusedRMSNorm` takes less time than `kind`, forward and backward, in float32 on this machine."""

    def fused(norm: Any, x: Tensor) -> Tensor:
        return FusedRMSNorm.apply(x, norm.weight, norm.variance_epsilon)

    ways = {"plain": lambda: _timed(kind.forward, size), "fused": lambda: _timed(fused, size)}
    return fastest(f"training rms norm of {size}", ways) == "fused"


def _timed(forward: Callable[[Any, Tensor], Tensor], size: int) -> Callable[[], object]:
    with torch.inference_mode(False):
        x = torch.ones(max(1, TIMED_ELEMENTS // size), size, requires_grad=True)
        norm = SimpleNamespace(weight=torch.ones(size, requires_grad=True), variance_epsilon=1e-6)
        grad = torch.ones_like(x)

    def step() -> object:
        with torch.inference_mode(False), torch.enable_grad():
            return torch.autograd.grad(forward(norm, x), (x, norm.weight), grad)

    return step


@functools.cache
def is_plain_rms_norm(kind: type[nn.Module]) -> bool:
    """Whether the class computes weight * x / rms(x) from x alone; decided by running it once."""
    if not kind.__name__.endswith("RMSNorm") or len(inspect.signature(kind.forward).parameters) != 2:
        return False
    x = torch.linspace(-2, 3, 24).sin().view(3, 8)
    norm = SimpleNamespace(weight=torch.linspace(0.5, 2, 8), variance_epsilon=0.25)
    try:
        output = kind.forward(norm, x)  # a plain norm reads these attributes only
    except (AttributeError, TypeError):
        return False
    return torch.allclose(output, FusedRMSNorm.apply(x, norm.weight, norm.variance_epsilon), atol=1e-6)


@functools.cache
def _with_fused_norm(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass with another forward, so that copies of a module compute with their own weights."""

    def forward(self: Any, x: Tensor) -> Tensor:
        if x.dtype in FUSED_DTYPES and x.dtype == self.weight.dtype:
            return FusedRMSNorm.apply(x, self.weight, self.variance_epsilon)
        return kind.forward(self, x)

    return type(kind.__name__, (kind,), {"forward": forward})


class FusedRMSNorm(torch.autograd.Function):
    """y = w x r with r = (mean(x^2) + eps)^(-1/2), over the last dimension D.

    For g = dl/dy: dl/dw = sum of g x r over all rows, dl/dx = g w r - x r^3 sum(g x w) / D.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        l2_norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse_rms = l2_norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        return multiplied(x * inverse_rms, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        if torch.compiler.is_compiling():  # which gives `out` the strides of `grad`
            grad = grad.contiguous()
        size = x.shape[-1]
        product = (x * grad).reshape(-1, size)
        correction = (product @ weight).view_as(inverse_rms).mul_(inverse_rms**3).div_(-size)
        grad_x = torch.mul(grad, weight, out=torch.empty_like(x)).mul_(inverse_rms).addcmul_(x, correction)
        grad_weight = product.mul_(inverse_rms.view(-1, 1)).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None
