"""A copy of the projections in the layout of oneDNN's CPU kernels, with the next operations fused in.

A plain bfloat16 matrix is converted at each product; with few rows that takes longer than the product. Plain float32
products are the vendor library's, which on other makes uses half the processor's width. The layout is lossless:
`to_dense` returns the plain matrix bit for bit, which is how the copy is verified after a weight sync.
"""

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from verl.models.decoder.lean_layer import Layer, OutputHead, Projection, silu_in_place

MAX_ONEDNN_BYTES = 4 << 30  # a larger model is read in place: the copy would cost more in memory than it saves
_LAYOUT_ROWS = 64  # the layout is chosen for about this many rows
_ROW_STEP = 8


def padded_rows(rows: int) -> int:
    """At least `rows`, by at most an eighth or 7 more: oneDNN takes milliseconds for each new number of rows."""
    step = max(_ROW_STEP, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


def can_use_onednn_layout(dtype: torch.dtype, device: torch.device, size_bytes: int) -> bool:
    """Whether this torch supports oneDNN's layouts for the dtype, and the copy is small enough."""
    if device.type != "cpu" or size_bytes > MAX_ONEDNN_BYTES or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


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
