"""Fixes the layout of the decoder's weights, which is otherwise the fastest on the machine."""

import pytest
import torch

from verl.models.decoder import lean_weights
from verl.models.decoder.onednn_weights import can_use_onednn_layout
from verl.models.decoder.weight_layouts import WeightLayout


def use_layout(monkeypatch: pytest.MonkeyPatch, merged: bool = False, onednn: bool | None = None) -> None:
    """Leave one layout to choose from; oneDNN's for bfloat16 unless it is given."""

    def only(_num_weights: int, dtype: torch.dtype, device: torch.device) -> list[WeightLayout]:
        layout = WeightLayout(dtype, merged, dtype == torch.bfloat16 if onednn is None else onednn)
        if layout.onednn and not can_use_onednn_layout(dtype, device, 0):
            pytest.skip(f"this processor has no products of {dtype} in oneDNN's layout (AVX-512 for bfloat16)")
        return [layout]

    monkeypatch.setattr(lean_weights, "possible_layouts", only)
