"""Exact causal attention of packed sequences: a varlen kernel where one works, otherwise a loop.

Shapes: H query heads, K key/value heads, T packed tokens, L one sequence, D head size.
"""

import functools
import inspect
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

logger = logging.getLogger(__name__)


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

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> "Packing":
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        return cls(tuple(lengths), boundaries.to(device, torch.int32))

    def with_extra_sequence(self, length: int) -> "Packing":
        """The same sequences and one more of `length` tokens."""
        return Packing.of_lengths((*self.lengths, length), self.cu_seqlens.device)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def equal_length_runs(self) -> list[tuple[int, int]]:
        """(count, length) of consecutive sequences of equal length: each run is one batched call, without a copy."""
        return [(sum(1 for _ in group), length) for length, group in groupby(self.lengths)]


@dataclass(frozen=True)
class AttentionSpec:
    """Scale, dropout, window, soft cap and sinks of one attention layer."""

    scaling: float | None
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # (H,)

    @property
    def is_plain_softmax(self) -> bool:
        return self.softcap is None and self.sinks is None


def attend_sequences(query: Tensor, key: Tensor, value: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    """Each sequence attends to itself: (1, H, T, D), (1, K, T, D), (1, K, T, D) -> (1, T, H, D)."""
    if _can_use_varlen(query, value, spec):
        return _attend_varlen(query, key, value, packing, spec)
    return _attend_by_length_runs(query, key, value, packing, spec)


def _attend_by_length_runs(query: Tensor, key: Tensor, value: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    """One call per run of equally long sequences. The fastest exact way on a CPU, and correct everywhere."""
    runs, outputs = packing.equal_length_runs(), []
    sizes = [count * length for count, length in runs]
    # split, not slices: the gradient of a split is one concatenation, that of each slice a full tensor of zeros
    for (count, length), *parts in zip(runs, *(x.squeeze(0).split(sizes, 1) for x in (query, key, value)), strict=True):
        rows = (part.unflatten(1, (count, length)).transpose(0, 1) for part in parts)
        out = attend(*rows, spec)  # (count, H, length, D)
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # (count * length, H, D)
    return (torch.cat(outputs) if len(outputs) > 1 else outputs[0]).unsqueeze(0)


def attend(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention of queries (N, H, L, D), the last L tokens of each row, to the row's keys (N, K, S, D)."""
    length, total = query.shape[2], key.shape[2]
    window = spec.window if spec.window is not None and spec.window < total else None
    mask = None
    if window is not None or length != total or not spec.is_plain_softmax:
        mask = _causal_window_mask(length, total, window or total, query.device)
    if not spec.is_plain_softmax:
        return attend_eager(query, key, value, spec, mask)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=spec.dropout,
        is_causal=mask is None,
        scale=spec.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _causal_window_mask(length: int, total: int, window: int, device: torch.device) -> Tensor:
    """(L, S) True where the last L of S tokens attend: to themselves and to the `window - 1` tokens before."""
    positions = torch.arange(total, device=device)
    distance = positions[total - length :, None] - positions[None, :]
    return (distance >= 0) & (distance < window)


def attend_eager(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """Attention with soft-capped scores or sinks, which no fused kernel here supports; scores in fp32 or wider."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scale = spec.scaling if spec.scaling is not None else 1 / math.sqrt(query.shape[-1])
    scores = (query @ key.transpose(2, 3) * scale).to(torch.promote_types(query.dtype, torch.float32))
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        # the lowest number, not -inf: a padding token that attends to nothing gets a finite output instead of NaN
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        probabilities = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return F.dropout(probabilities, spec.dropout).to(query.dtype) @ value


def _can_use_varlen(query: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
    if query.device.type == "cpu" or not spec.is_plain_softmax or spec.dropout or query.shape[-1] != value.shape[-1]:
        return False
    return query.dtype in (torch.float16, torch.bfloat16) and _varlen_works(
        query.device.type, query.dtype, query.shape[-1]
    )


@functools.cache
def _varlen_works(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the varlen kernel runs here and agrees with the loop; tried once per device type, dtype and size.

    The first call may come without gradients, or inside a checkpointed layer that counts saved tensors.
    """
    with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
        return _try_varlen(device_type, dtype, head_dim)


def _try_varlen(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    packing = Packing((3, 5), torch.tensor([0, 3, 8], device=device_type, dtype=torch.int32))
    spec = AttentionSpec(None, 0.0, 2, None, None)
    values = torch.linspace(-2, 2, 8 * head_dim).sin().view(1, 1, 8, head_dim).to(device_type, dtype)
    query, key = torch.cat([values, -values], 1).requires_grad_(), values.requires_grad_()
    try:
        varlen_out = _attend_varlen(query, key, key, packing, spec)
        varlen_out.sum().backward()
    except (ImportError, RuntimeError, NotImplementedError, TypeError) as error:
        logger.warning("no varlen attention on %s in %s, sequences one by one instead: %s", device_type, dtype, error)
        return False
    if torch.allclose(varlen_out, _attend_by_length_runs(query, key, key, packing, spec), atol=0.02):
        return True
    logger.warning("varlen attention on %s in %s gives wrong numbers; sequences one by one instead", device_type, dtype)
    return False


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups, gqa_arguments = query.shape[1] // key.shape[1], {}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        gqa_arguments["enable_gqa"] = groups > 1
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
        scale=spec.scaling,
        window_size=(-1 if spec.window is None else spec.window - 1, 0),
        **gqa_arguments,
    )
    return out.unsqueeze(0)
