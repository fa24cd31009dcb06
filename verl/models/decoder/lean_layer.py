"""One transformer block as the lean decoder runs it, over the module's own tensors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


class Norm:
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps, self.size = weight, eps, (weight.shape[-1],)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.size, self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), self.size, None, self.eps).to(x.dtype)


@dataclass
class Projection:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        """residual + the product; `residual` may be overwritten."""
        return residual.add_(self(x))

    def gated(self, x: Tensor, gate: "Projection", activation: Callable[[Tensor], Tensor]) -> Tensor:
        """activation(gate's product) times the product."""
        return activation(gate(x)).mul_(self(x))


@dataclass
class OutputHead:
    """The last norm and the projection to the vocabulary."""

    norm: Norm
    projection: Projection

    def __call__(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


@dataclass
class Layer:
    """One transformer block's tensors and the steps around attention."""

    input_norm: Norm
    post_norm: Norm
    q: Projection
    k: Projection
    v: Projection
    attention_out: Projection
    q_norm: Norm | None
    k_norm: Norm | None
    gate: Projection
    up: Projection
    down: Projection
    activation: Callable[[Tensor], Tensor]
    head_dim: int
    scale: float
    window: int | None

    def qkv(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys side by side (..., H+K, E), and values (..., K, E)."""
        x = self.input_norm(x)
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(torch.cat((q, k), dim=-2), *rotation), v

    def add_attention(self, x: Tensor, out: Tensor) -> Tensor:
        return self.attention_out.add_residual(out, x)

    def add_mlp(self, x: Tensor) -> Tensor:
        return self.down.add_residual(self.up.gated(self.post_norm(x), self.gate, self.activation), x)


def silu_in_place(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (..., heads, E); cos and sin (..., 1, E)."""
    low, high = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((-high, low), dim=-1), sin)
