"""The flash kernels of torch over packed segments, on devices and CPUs, and packed attention as one operator.

Query heads in groups share a key-value head; nothing is repeated. Shapes: H query heads, K key/value heads, S packed
queries, T packed tokens, D head size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from verl.models.attention.packing import Packing


@dataclass(frozen=True)
class Segments:
    """Segment i of the queries attends to segment i of the keys."""

    queries: Packing
    keys: Packing
    causal: bool
    scale: float | None
    window: int | None = None  # tokens that a query sees, itself included; of segments that attend to themselves

    @property
    def on_device(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Boundaries, dropout, causality and options of the device's kernels."""
        lengths = self.queries.max_length, self.keys.max_length
        options = {} if self.window is None else {"window_size_left": self.window - 1, "window_size_right": 0}
        boundaries = self.queries.cu_seqlens, self.keys.cu_seqlens, *lengths, 0.0, self.causal
        return boundaries, {"scale": self.scale, **options}

    def on_cpu(self, query: Tensor) -> tuple[tuple[float, bool], dict[str, Any]]:
        """Dropout, causality and options of the CPU's kernels for one run of segments."""
        length = query.shape[2]
        if self.window is None or self.window >= length:
            return (0.0, self.causal), {"scale": self.scale}
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - self.window)
        mask = torch.zeros(length, length, dtype=query.dtype).masked_fill_(~seen, -torch.inf)
        return (0.0, False), {"scale": self.scale, "attn_mask": mask}


def flash(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """The output (1, H, S, D) and its log-sum-exp (1, H, S)."""
    if query.device.type != "cpu":
        inputs = [_tokens_first(x) for x in (query, key, value)]
        boundaries, options = segments.on_device
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*inputs, *boundaries, False, **options)
        return out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    outs, lses = [], []
    for q, k, v in _batched_runs(segments, (query,), (key, value)):
        if not q.numel():  # of a group whose sequences are all equal; the kernel divides by the number of queries
            continue
        how, options = segments.on_cpu(q)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, *how, **options)
        outs.append(_unbatched(out))
        lses.append(_unbatched(lse.unsqueeze(-1)))
    return torch.cat(outs, 2), torch.cat(lses, 2).squeeze(-1)


def flash_backward(
    grad_out: Tensor, query: Tensor, out: Tensor, lse: Tensor, key: Tensor, value: Tensor, segments: Segments
) -> list[Tensor]:
    """Gradients of query, key and value of a `flash` call, given the out and lse of the whole softmax."""
    if query.device.type != "cpu":
        inputs = [_tokens_first(x) for x in (grad_out, query, key, value, out)]
        boundaries, options = segments.on_device
        rng = (torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device))
        grads = torch.ops.aten._flash_attention_backward(*inputs, lse[0].contiguous(), *boundaries, *rng, **options)
        return [x.transpose(0, 1).unsqueeze(0) for x in grads]
    gradients = []
    for g, q, o, s, k, v in _batched_runs(segments, (grad_out, query, out, lse.unsqueeze(-1)), (key, value)):
        if not q.numel():
            gradients.append([_unbatched(x) for x in (q, torch.zeros_like(k), torch.zeros_like(v))])
            continue
        how, options = segments.on_cpu(q)
        kernel_grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, o, s.squeeze(-1), *how, **options
        )
        gradients.append([_unbatched(x) for x in kernel_grads])
    return [torch.cat(parts, 2) for parts in zip(*gradients, strict=True)]


def _tokens_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1).contiguous()


def _batched_runs(
    segments: Segments, query_tensors: tuple[Tensor, ...], key_tensors: tuple[Tensor, ...]
) -> Iterator[tuple[Tensor, ...]]:
    """Each run of adjacent segments of equal lengths, batched as (N, heads, L, D)."""
    offsets = [0, 0]
    for lengths, same in groupby(zip(segments.queries.lengths, segments.keys.lengths, strict=True)):
        count, rows = len(list(same)), []
        for side, tensors in enumerate((query_tensors, key_tensors)):
            part = slice(offsets[side], offsets[side] + count * lengths[side])
            rows += [x[0, :, part].unflatten(1, (count, lengths[side])).transpose(0, 1) for x in tensors]
            offsets[side] = part.stop
        yield tuple(rows)


def _unbatched(x: Tensor) -> Tensor:
    """(N, heads, L, D) -> (1, heads, N * L, D)."""
    return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)


# --- one operator: to a compiler, the boundaries are tensors like any others ------------------------------------------


@torch.library.custom_op("verl::packed_attention", mutates_args=())
def packed_flash(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, boundaries: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Causal attention inside each sequence: (1, T, H, D) and its log-sum-exp (1, H, T). `window` 0: all tokens."""
    out, lse = flash(query, key, value, _themselves(cu_seqlens, boundaries, scale, window))
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@torch.library.custom_op("verl::packed_attention_backward", mutates_args=())
def packed_flash_backward(
    grad_out: Tensor, saved: list[Tensor], scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, cu_seqlens, boundaries, out, lse = saved
    segments = _themselves(cu_seqlens, boundaries, scale, window)
    gradients = flash_backward(grad_out.transpose(1, 2), query, out.transpose(1, 2), lse, key, value, segments)
    grad_query, grad_key, grad_value = (x.contiguous() for x in gradients)
    return grad_query, grad_key, grad_value


def _themselves(cu_seqlens: Tensor, boundaries: Tensor, scale: float, window: int) -> Segments:
    packing = Packing(tuple(boundaries.diff().tolist()), cu_seqlens, boundaries)
    return Segments(packing, packing, True, scale, window or None)


@packed_flash.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    one, heads, tokens, size = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(one, tokens, heads, size), query.new_empty(one, heads, tokens, dtype=wide)


@packed_flash_backward.register_fake
def _(grad_out: Tensor, saved: list[Tensor], *_: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[:3])


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *packed_flash_backward(grad_out, list(ctx.saved_tensors), ctx.scale, ctx.window), None, None, None, None


packed_flash.register_autograd(_gradients, setup_context=_save_inputs)
