"""A merged copy of a small model's weights: fewer operations per layer than over the module's own tensors.

Queries, keys and values are one product (gate and up stay apart: halves of one product are slow to walk). The norms'
weights and the attention scale are folded into the matrices that follow. The rotary pairs (i, i + E/2) lie side by
side, so a rotation is one complex product; queries and keys are permuted alike, so their products do not change. For
bfloat16 only the matrices are rounded, and multiplied by the kernels of `decoder_reordered`; the rest stays float32.

Only worth it where operations, not arithmetic, take the time: `MAX_MERGED_BYTES` bounds the copy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.models.decoder.lean_layer import Layer, Norm, OutputHead, Projection
from verl.models.decoder.onednn_weights import OneDNNProjection

MAX_MERGED_BYTES = 64 << 20


@dataclass
class MergedProjection:
    """x W' + b for W' stored input-major."""

    weight: Tensor  # (in, out)
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out = x @ self.weight
        return out if self.bias is None else out.add_(self.bias)

    def gated(self, x: Tensor, gate: "MergedProjection", activation: Callable[[Tensor], Tensor]) -> Tensor:
        """activation(gate's product) times the product."""
        return activation(gate(x)).mul_(self(x))


class MergedBfloat16Projection(MergedProjection):
    """The same with a bfloat16 matrix in oneDNN's layout; float32 out, except between gate and down."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        plain = Projection(weight.to(torch.bfloat16), None if bias is None else bias.to(torch.bfloat16))
        self.product = OneDNNProjection(plain)

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x.to(torch.bfloat16)).float()

    def gated(self, x: Tensor, gate: MergedProjection, activation: Callable[[Tensor], Tensor]) -> Tensor:
        assert isinstance(gate, MergedBfloat16Projection)
        return self.product.gated(x.to(torch.bfloat16), gate.product, activation)


def merge_projections(projections: list[Projection], norm: Norm | None, use_bfloat16: bool) -> MergedProjection:
    """Several projections of one input as one, behind a norm whose weight is folded in."""
    weight = torch.cat([p.weight for p in projections])
    if norm is not None:
        weight = weight * norm.weight
    biases = [p.bias for p in projections]
    bias = None if biases[0] is None else torch.cat(biases)
    return MergedBfloat16Projection(weight, bias) if use_bfloat16 else MergedProjection(weight.t().contiguous(), bias)


class MergedLayer:
    """The steps of `Layer` on merged weights; rotations are complex numbers (..., H+K, E/2)."""

    scale = 1.0  # folded into the queries

    def __init__(self, layer: Layer, heads: int, kv_heads: int, use_bfloat16: bool):
        self.head_dim, self.num_rotated_heads, self.window = layer.head_dim, heads + kv_heads, layer.window
        q, k = (_interleave_projection(p, layer.head_dim) for p in (layer.q, layer.k))
        self.norm_weight: Tensor | None = None
        if layer.q_norm is None:
            q = Projection(q.weight * layer.scale, None if q.bias is None else q.bias * layer.scale)
        else:
            q_weight, k_weight = (_interleave(n.weight, layer.head_dim) for n in (layer.q_norm, layer.k_norm))
            self.norm_weight = torch.cat(((q_weight * layer.scale).expand(heads, -1), k_weight.expand(kv_heads, -1)))
            self.head_eps = torch.tensor(layer.q_norm.eps)
        self.qkv_merged = merge_projections([q, k, layer.v], layer.input_norm, use_bfloat16)
        self.out = merge_projections([layer.attention_out], None, use_bfloat16)
        self.gate = merge_projections([layer.gate], layer.post_norm, use_bfloat16)
        self.up = merge_projections([layer.up], layer.post_norm, use_bfloat16)
        self.down = merge_projections([layer.down], None, use_bfloat16)
        self.activation: Callable[[Tensor], Tensor] = layer.activation
        self.input_eps, self.post_eps = torch.tensor(layer.input_norm.eps), torch.tensor(layer.post_norm.eps)

    def qkv(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys side by side (..., H+K, E), and values (..., K, E)."""
        y = self.qkv_merged(unit_norm(x, self.input_eps)).unflatten(-1, (-1, self.head_dim))
        qk, v = y[..., : self.num_rotated_heads, :], y[..., self.num_rotated_heads :, :]
        if self.norm_weight is not None:
            qk = unit_norm(qk, self.head_eps).mul_(self.norm_weight)
        rotated = torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * rotation
        return torch.view_as_real(rotated).flatten(-2), v

    def add_attention(self, x: Tensor, out: Tensor) -> Tensor:
        return x.add_(self.out(out))

    def add_mlp(self, x: Tensor) -> Tensor:
        return x.add_(self.down(self.up.gated(unit_norm(x, self.post_eps), self.gate, self.activation)))


class MergedHead:
    """The last norm and the product with the vocabulary on one merged matrix."""

    def __init__(self, head: OutputHead, use_bfloat16: bool):
        self.merged, self.eps = (
            merge_projections([head.projection], head.norm, use_bfloat16),
            torch.tensor(head.norm.eps),
        )

    def __call__(self, x: Tensor) -> Tensor:
        return self.merged(unit_norm(x, self.eps))


def unit_norm(x: Tensor, eps: Tensor) -> Tensor:
    """x over the root mean square of its last dimension."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()


def rotation_table(cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """(positions, heads, E/2) complex from the model's own (positions, E) tables; a product that broadcasts is slow."""
    half = cos.shape[-1] // 2
    rotations = torch.complex(cos[:, :half].contiguous(), sin[:, :half].contiguous())
    return rotations.unsqueeze(1).repeat(1, heads, 1)


def _interleave(x: Tensor, head_dim: int) -> Tensor:
    """Rows (heads * E, ...) with the halves of each head dealt alternately."""
    halves = x.reshape(-1, 2, head_dim // 2, *x.shape[1:])
    return halves.transpose(1, 2).reshape(x.shape)


def _interleave_projection(projection: Projection, head_dim: int) -> Projection:
    bias = None if projection.bias is None else _interleave(projection.bias, head_dim)
    return Projection(_interleave(projection.weight, head_dim), bias)
