"""A bfloat16 copy of the projections in the layout that oneDNN's CPU kernels walk, with what follows fused in.

A plain matrix is laid out anew at each product; with few rows that takes longer than the product. The layout loses
nothing: `to_dense` gives the plain matrix back bit for bit, which is how a publish proves the copy.
"""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from verl.models.decoder.lean_layer import Layer, OutputHead, Projection, silu_in_place

MAX_ONEDNN_BYTES = 4 << 30  # a larger model is read in place: its copy would cost more memory than time
_LAYOUT_ROWS = 64  # the layout is chosen for about this many rows


def can_use_onednn_layout(dtype: torch.dtype, device: torch.device, size_bytes: int) -> bool:
    """Whether this torch has oneDNN's layouts for the type, and the copy is small enough."""
    if dtype != torch.bfloat16 or device.type != "cpu" or size_bytes > MAX_ONEDNN_BYTES:
        return False
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class OneDNNProjection(Projection):
    """x W^T + b for W in oneDNN's own layout."""

    def __init__(self, plain: Projection):
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(plain.weight.contiguous(), _LAYOUT_ROWS), plain.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    def add_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")

    def gated(self, x: Tensor, gate: Projection, activation: Callable[[Tensor], Tensor]) -> Tensor:
        if activation is silu_in_place:
            left = torch.ops.mkldnn._linear_pointwise(x, gate.weight, gate.bias, "swish", [], "")
        else:
            left = activation(gate(x))
        return torch.ops.mkldnn._linear_pointwise.binary(x, left, self.weight, self.bias, "mul")


def to_onednn_layout(part: Layer | OutputHead) -> None:
    """Replace the projections of a layer or head by copies in oneDNN's layout."""
    for field in fields(part):
        plain = getattr(part, field.name)
        if isinstance(plain, Projection):
            setattr(part, field.name, OneDNNProjection(plain))
