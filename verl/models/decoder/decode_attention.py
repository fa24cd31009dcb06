"""Attention of one new token per row to the row's cached columns: the fused kernel, or two plain products.

Shapes: B rows, K key-value heads, H/K query heads of each, W columns, E head size.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.decoder.weight_layouts import DecoderShape
from verl.models.fastest import fastest

# queries (B, K, H/K, E), keys and values (B, K, W, E), bias (B, 1, 1, W) or None, scale -> (B, K, H/K, E)
DecodeAttention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
TIMED_ROWS, TIMED_COLUMNS, SPARE_COLUMNS = 128, 96, 81


def attend_by_kernel(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=scale)


def attend_by_products(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = (q if scale == 1.0 else q * scale) @ keys.transpose(2, 3)
    if bias is not None:
        scores += bias
    return scores.softmax(-1) @ values


WAYS: dict[str, DecodeAttention] = {"kernel": attend_by_kernel, "products": attend_by_products}


def fastest_attention(shape: DecoderShape, dtype: torch.dtype, device: torch.device) -> DecodeAttention:
    """The faster way on this machine; always the kernel in low precision, where products would round the scores."""
    if device.type != "cpu" or dtype.itemsize < 4:
        return attend_by_kernel
    ways = {name: lambda attend=attend: _timed(attend, shape, dtype) for name, attend in WAYS.items()}
    name = f"decode attention {dtype}, {shape.heads} heads, {shape.kv_heads} key-value heads of {shape.head_dim}"
    return WAYS[fastest(name, ways)]


def _timed(attend: DecodeAttention, shape: DecoderShape, dtype: torch.dtype) -> Callable[[], Tensor]:
    cache = torch.zeros(2, TIMED_ROWS, shape.kv_heads, TIMED_COLUMNS + SPARE_COLUMNS, shape.head_dim, dtype=dtype)
    keys, values = cache[:, :, :, :TIMED_COLUMNS]
    q = torch.zeros(TIMED_ROWS, shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim, dtype=dtype)
    return lambda: attend(q, keys, values, None, 1.0)
