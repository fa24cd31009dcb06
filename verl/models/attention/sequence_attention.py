"""Exact causal attention of packed sequences: a varlen kernel where one works, otherwise a loop.

Shapes: H query heads, K key/value heads, T packed tokens, L one sequence, D head size.
"""

import functools
import logging
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from verl.models.attention.flash_kernels import packed_flash
from verl.models.attention.packing import Packing, equal_length_runs

logger = logging.getLogger(__name__)


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


@torch.compiler.disable
def _attend_by_length_runs(query: Tensor, key: Tensor, value: Tensor, packing: Packing, spec: AttentionSpec) -> Tensor:
    """One call per run of equally long sequences. The fastest exact way on a CPU, and correct everywhere."""
    runs, outputs = equal_length_runs(packing.lengths), []
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
    if not spec.is_plain_softmax or spec.dropout or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type == "cpu":  # the loop copies less, but a compiled layer would have a graph for each pack
        return torch.compiler.is_compiling()
    return query.dtype in (torch.float16, torch.bfloat16) and varlen_works(
        query.device.type, query.dtype, query.shape[-1]
    )


@torch.compiler.assume_constant_result
def varlen_works(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """`_varlen_works`, which a compiler takes as it is."""
    return _varlen_works(device_type, dtype, head_dim)


@functools.cache
def _varlen_works(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the varlen kernel runs here and agrees with the loop; tried once per device type, dtype and size.

    The first call may come without gradients, or inside a checkpointed layer that counts saved tensors.
    """
    with torch.enable_grad(), saved_tensors_hooks(lambda t: t, lambda t: t):
        return _try_varlen(device_type, dtype, head_dim)


def _try_varlen(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    packing = Packing.of_lengths((3, 5), torch.device(device_type))
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
    scale = query.shape[-1] ** -0.5 if spec.scaling is None else spec.scaling
    return packed_flash(query, key, value, packing.cu_seqlens, packing.boundaries, scale, spec.window or 0)[0]
