"""The layouts of a decoder's weights: the module's own, merged, oneDNN's, or both."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl.models.decoder.lean_layer import Layer, OutputHead
from verl.models.decoder.merged_weights import (
    MAX_MERGED_BYTES,
    MIN_ONEDNN_ROWS,
    MergedHead,
    MergedLayer,
    rotation_table,
)
from verl.models.decoder.onednn_weights import can_use_onednn_layout, padded_rows, to_onednn_layout

LayerOrHead = Layer | OutputHead | MergedLayer | MergedHead


@dataclass(frozen=True)
class DecoderShape:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None  # tokens a sliding layer sees, the newest included
    vocab: int


@dataclass(frozen=True)
class WeightLayout:
    """How the matrices, of `dtype`, are stored."""

    dtype: torch.dtype
    merged: bool = False
    onednn: bool = False

    @property
    def is_plain(self) -> bool:
        return not (self.merged or self.onednn)

    @property
    def name(self) -> str:
        return "plain" if self.is_plain else " ".join(["merged"] * self.merged + ["onednn"] * self.onednn)

    @property
    def activation_dtype(self) -> torch.dtype:
        return torch.float32 if self.merged else self.dtype

    def padded_rows(self, rows: int) -> int:
        """How many rows to compute for `rows`."""
        has_plain = self.merged and self.dtype == torch.float32
        return rows if not self.onednn or (has_plain and rows < MIN_ONEDNN_ROWS) else padded_rows(rows)

    def apply(self, part: LayerOrHead, shape: DecoderShape) -> LayerOrHead:
        """The layer or head, read in `activation_dtype`, in this layout; `part` may be changed."""
        onednn_dtype = self.dtype if self.onednn else None
        if self.merged and isinstance(part, OutputHead):
            return MergedHead(part, onednn_dtype)
        if self.merged:
            return MergedLayer(part, shape.heads, shape.kv_heads, onednn_dtype)
        if self.onednn:
            to_onednn_layout(part)
        return part

    def rotary_tables(
        self, model: nn.Module, shape: DecoderShape, positions: int, device: torch.device
    ) -> tuple[Tensor, ...]:
        """(cos, sin), or of a merged layer (complex rotations,), one row per position, by the model's rotary module."""
        probe = torch.empty(0, dtype=self.activation_dtype, device=device)
        cos, sin = model.model.rotary_emb(probe, torch.arange(positions, device=device).unsqueeze(0))
        if self.merged:
            return (rotation_table(cos[0], sin[0], shape.heads + shape.kv_heads),)
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def possible_layouts(num_weights: int, dtype: torch.dtype, device: torch.device) -> list[WeightLayout]:
    """The layouts that this torch supports and whose copy is small enough; the plain one comes first."""
    onednn = can_use_onednn_layout(dtype, device, num_weights * dtype.itemsize)
    small = device.type == "cpu" and num_weights * torch.float32.itemsize <= MAX_MERGED_BYTES
    layouts = [WeightLayout(dtype)]
    if onednn:
        layouts.append(WeightLayout(dtype, onednn=True))
    if small and dtype == torch.float32:
        layouts.append(WeightLayout(dtype, merged=True))
    if small and onednn:
        layouts.append(WeightLayout(dtype, merged=True, onednn=True))
    return layouts
