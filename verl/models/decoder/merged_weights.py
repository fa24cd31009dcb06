"""A merged copy of a small model's weights: fewer operations per layer than over the module's own tensors.

Queries, keys and values are one matmul (gate and up stay apart: halves of one output are slow to read). The norms'
weights and the attention scale are folded into the matrices that follow. The rotary pairs (i, i + E/2) are adjacent, so
a rotation is one complex product; queries and keys are permuted in the same way, so their products do not change. In
bfloat16 only the matrices are rounded; the rest stays float32. The products are plain, or those of `onednn_weights`.

It pays off only where launching operations, not arithmetic, takes the time: `MAX_MERGED_BYTES` bounds the copy.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.models.decoder.lean_layer import Layer, Norm, OutputHead, Projection
from verl.models.decoder.onednn_weights import OneDNNProjection

MAX_MERGED_BYTES = 64 << 20
MIN_ONEDNN_ROWS = 16


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


class MergedOneDNNProjection(MergedProjection):
    """The same in oneDNN's layout, with the matrix in `dtype`; float32 out, except between gate and down.

    A call of oneDNN costs as much as a plain product of a few rows, so a float32 matrix is also stored plain for them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype):
        self.dtype = dtype
        self.product = OneDNNProjection(Projection(weight.to(dtype), None if bias is None else bias.to(dtype)))
        self.few_rows = MergedProjection(weight.t().contiguous(), bias) if dtype == torch.float32 else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.few_rows is not None and len(x) < MIN_ONEDNN_ROWS:
            return self.few_rows(x)
        return self.product(x.to(self.dtype)).float()

    def gated(self, x: Tensor, gate: MergedProjection, activation: Callable[[Tensor], Tensor]) -> Tensor:
        assert isinstance(gate, MergedOneDNNProjection)
        if self.few_rows is not None and gate.few_rows is not None and len(x) < MIN_ONEDNN_ROWS:
            return self.few_rows.gated(x, gate.few_rows, activation)
        return self.product.gated(x.to(self.dtype), gate.product, activation)


def merge_projections(
    projections: list[Projection], norm: Norm | None, onednn_dtype: torch.dtype | None
) -> MergedProjection:
    """Several projections of one input as one, behind a norm whose weight is folded in.

    In oneDNN's layout if `onednn_dtype` is given, else plain.
    """
    weight = torch.cat([p.weight for p in projections])
    if norm is not None:
        weight = weight * norm.weight
    biases = [p.bias for p in projections]
    bias = None if biases[0] is None else torch.cat(biases)
    if onednn_dtype is not None:
        return MergedOneDNNProjection(weight, bias, onednn_dtype)
    return MergedProjection(weight.t().contiguous(), bias)


class MergedLayer:
    """The steps of `Layer` on merged weights; rotations are complex numbers (..., H+K, E/2)."""

    scale = 1.0  # folded into the queries

    def __init__(self, layer: Layer, heads: int, kv_heads: int, onednn_dtype: torch.dtype | None):
        self.head_dim, self.num_rotated_heads, self.window = layer.head_dim, heads + kv_heads, layer.window
        q, k = (_interleave_projection(p, layer.head_dim) for p in (layer.q, layer.k))
        self.norm_weight: Tensor | None = None
        if layer.q_norm is None:
            q = Projection(q.weight * layer.scale, None if q.bias is None else q.bias * layer.scale)
        else:
            q_weight, k_weight = (_interleave(n.weight, layer.head_dim) for n in (layer.q_norm, layer.k_norm))
            self.norm_weight = torch.cat(((q_weight * layer.scale).expand(heads, -1), k_weight.expand(kv_heads, -1)))
            self.head_eps = torch.tensor(layer.q_norm.eps)
        self.qkv_merged = merge_projections([q, k, layer.v], layer.input_norm, onednn_dtype)
        self.out = merge_projections([layer.attention_out], None, onednn_dtype)
        self.gate = merge_projections([layer.gate], layer.post_norm, onednn_dtype)
        self.up = merge_projections([layer.up], layer.post_norm, onednn_dtype)
        self.down = merge_projections([layer.down], None, onednn_dtype)
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
    """The last norm and the projection to the vocabulary as one merged matrix."""

    def __init__(self, head: OutputHead, onednn_dtype: torch.dtype | None):
        self.merged = merge_projections([head.projection], head.norm, onednn_dtype)
        self.eps = torch.tensor(head.norm.eps)

    def __call__(self, x: Tensor) -> Tensor:
        return self.merged(unit_norm(x, self.eps))


def unit_norm(x: Tensor, eps: Tensor) -> Tensor:
    """x over the root mean square of its last dimension."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, length, length, value=1.0 / x.shape[-1]).rsqrt_()


def rotation_table(cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """(positions, heads, E/2) complex from the model's own (positions, E) tables; repeated, as broadcasting is slow."""
    half = cos.shape[-1] // 2
    rotations = torch.complex(cos[:, :half].contiguous(), sin[:, :half].contiguous())
    return rotations.unsqueeze(1).repeat(1, heads, 1)


def _interleave(x: Tensor, head_dim: int) -> Tensor:
    """Rows (heads * E, ...) with the halves of each head interleaved."""
    halves = x.reshape(-1, 2, head_dim // 2, *x.shape[1:])
    return halves.transpose(1, 2).reshape(x.shape)


def _interleave_projection(projection: Projection, head_dim: int) -> Projection:
    bias = None if projection.bias is None else _interleave(projection.bias, head_dim)
    return Projection(_interleave(projection.weight, head_dim), bias)
