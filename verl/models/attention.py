"""Attention over sequences laid end to end: the one door through which packed tokens meet each other.

`model(input_ids=(1, T), position_ids=(1, T), cu_seqlens=Packing | (N+1,) tensor, use_cache=False)` keeps sequences
apart in every model of `transformers` whose attention goes through the attention interface, once `use_packed_attention`
has selected it. The boundaries are a forward argument, so recomputation under gradient checkpointing sees them too.

Shapes: H query heads, K key/value heads, T packed tokens, L one sequence, D head size.
"""

import functools
import inspect
import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

PACKED = "verl_packed"


@dataclass(frozen=True)
class Packing:
    """Sequence boundaries, on the host for loops and on the device for kernels."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # (N+1,) int32, on the model's device

    @classmethod
    def of(cls, cu_seqlens: "Packing | Tensor", device: torch.device) -> "Packing":
        if isinstance(cu_seqlens, Packing):
            return cu_seqlens
        lengths = tuple(cu_seqlens.diff().tolist())
        return cls(lengths, cu_seqlens.to(device=device, dtype=torch.int32))

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    def runs(self) -> list[tuple[int, int]]:
        """(count, length) of consecutive sequences of equal length: each run is one batched call, without a copy."""
        return [(sum(1 for _ in group), length) for length, group in groupby(self.lengths)]


def use_packed_attention(model: nn.Module) -> None:
    """Route every attention layer of `model` through `packed_attention`."""
    model.set_attn_implementation(PACKED)


def packed_attention(
    module: nn.Module,
    query: Tensor,  # (1, H, T, D)
    key: Tensor,  # (1, K, T, D)
    value: Tensor,  # (1, K, T, D)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    cu_seqlens: Packing | Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each sequence -> ((1, T, H, D), None).

    Without `cu_seqlens` every row of the batch is one sequence and `attention_mask`, if any, decides (generation with
    a cache). `softcap` bounds scores by tanh, `s_aux` (H,) are attention sinks.
    """
    shape = _Shape(scaling, dropout, sliding_window, softcap, s_aux)
    if cu_seqlens is None:
        return _unpacked(module, query, key, value, attention_mask, shape, kwargs)
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"packed attention takes one row of T tokens and no cache; got queries {tuple(query.shape)} and keys "
            f"{tuple(key.shape)}: pass input_ids (1, T) and use_cache=False"
        )
    packing = Packing.of(cu_seqlens, query.device)
    if _varlen_applies(query, value, shape):
        return _varlen(query, key, value, packing, shape), None
    return _per_sequence(query, key, value, packing, shape), None


@dataclass(frozen=True)
class _Shape:
    """How one layer attends."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def _unpacked(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shape: _Shape, kwargs: dict
) -> tuple[Tensor, None]:
    """Rows that are one sequence each: plain causal rows here, masks and caches by the library's own function."""
    if mask is None and query.shape[2] == key.shape[2]:
        _refuse_reset_positions(kwargs.get("position_ids"))
        return _attend(query, key, value, shape).transpose(1, 2).contiguous(), None
    if shape.plain:
        return sdpa_attention_forward(module, query, key, value, mask, shape.dropout, shape.scaling)
    return _scores_by_hand(query, key, value, shape, mask).transpose(1, 2).contiguous(), None


def _refuse_reset_positions(position_ids: Tensor | None) -> None:
    if position_ids is not None and position_ids.device.type == "cpu" and bool((position_ids.diff(dim=-1) < 0).any()):
        raise ValueError(
            "position_ids restart inside a row but no cu_seqlens were passed: the sequences would see each other. "
            "Pass cu_seqlens=... to the model's forward"
        )


def _per_sequence(query: Tensor, key: Tensor, value: Tensor, packing: Packing, shape: _Shape) -> Tensor:
    """One call per run of equally long sequences. The fastest exact way on a CPU, and correct everywhere."""
    runs, outputs = packing.runs(), []
    sizes = [count * length for count, length in runs]
    # split, not slices: the gradient of a split is one concatenation, that of a slice a whole tensor of zeros
    for (count, length), *parts in zip(runs, *(x.squeeze(0).split(sizes, 1) for x in (query, key, value)), strict=True):
        rows = (part.unflatten(1, (count, length)).transpose(0, 1) for part in parts)
        out = _attend(*rows, shape)  # (count, H, length, D)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # (count * length, H, D)
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).unsqueeze(0)


def _attend(query: Tensor, key: Tensor, value: Tensor, shape: _Shape) -> Tensor:
    """Causal attention of (N, H, L, D) rows that are one whole sequence each."""
    length = query.shape[2]
    window = shape.window if shape.window is not None and shape.window < length else None
    mask = None if window is None else _window_mask(length, window, query.device)
    if not shape.plain:
        mask = mask if mask is not None else _window_mask(length, length, query.device)
        return _scores_by_hand(query, key, value, shape, mask)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=shape.dropout,
        is_causal=mask is None,
        scale=shape.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """(L, L) True where a query may look: itself and the `window - 1` tokens before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _scores_by_hand(query: Tensor, key: Tensor, value: Tensor, shape: _Shape, mask: Tensor | None) -> Tensor:
    """Attention with soft-capped scores or sinks, which no fused kernel here offers; scores in fp32 or wider."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = shape.scaling if shape.scaling is not None else 1 / math.sqrt(query.shape[-1])
    scores = (query @ key.transpose(2, 3) * scale).to(torch.promote_types(query.dtype, torch.float32))
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if shape.sinks is not None:
        sinks = shape.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return F.dropout(weights, shape.dropout).to(query.dtype) @ value


def _varlen_applies(query: Tensor, value: Tensor, shape: _Shape) -> bool:
    if query.device.type == "cpu" or not shape.plain or shape.dropout or query.shape[-1] != value.shape[-1]:
        return False
    return query.dtype in (torch.float16, torch.bfloat16) and _varlen_works(
        query.device.type, query.dtype, query.shape[-1]
    )


@functools.cache
def _varlen_works(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the varlen kernel runs here and agrees with the loop; asked once per kind of device by trying it."""
    packing = Packing((3, 5), torch.tensor([0, 3, 8], device=device_type, dtype=torch.int32))
    shape = _Shape(None, 0.0, 2, None, None)
    values = torch.linspace(-2, 2, 8 * head_dim).sin().view(1, 1, 8, head_dim).to(device_type, dtype)
    query, key = torch.cat([values, -values], 1).requires_grad_(), values.requires_grad_()
    try:
        found = _varlen(query, key, key, packing, shape)
        found.sum().backward()
    except (ImportError, RuntimeError, NotImplementedError, TypeError):
        return False  # the loop over sequences gives the same numbers
    return torch.allclose(found, _per_sequence(query, key, key, packing, shape), atol=0.02)


def _varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, shape: _Shape) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups, grouped = query.shape[1] // key.shape[1], {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        grouped["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query_THD, key_TKD, value_TKD = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = varlen_attn(
        query_THD,
        key_TKD,
        value_TKD,
        packing.cu_seqlens,
        packing.cu_seqlens,
        packing.max_length,
        packing.max_length,
        scale=shape.scaling,
        window_size=(-1 if shape.window is None else shape.window - 1, 0),
        **grouped,
    )
    return out.unsqueeze(0)


def packed_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """No mask for whole sequences: `packed_attention` knows what may see what. Masks only for caches and padding."""
    if attention_mask is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, q_offset=q_offset, attention_mask=attention_mask, **kwargs)


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, packed_mask)
