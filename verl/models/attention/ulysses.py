"""Ulysses sequence parallelism: ranks split the tokens of a forward; attention exchanges tokens for heads.

Every rank of a group has the same packed sequences and computes an equal slice of their tokens. Attention needs all
tokens of a sequence, but its heads are independent: an all-to-all before it gives each rank some heads of all tokens,
and an all-to-all after it gives back all heads of the rank's own tokens.

Shapes: S ranks of the group, T tokens of all ranks, C = T / S of one, H query heads, K key/value heads, D head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.models.attention.packing import Packing
from verl.models.attention.prefix_sharing import PrefixPacking
from verl.models.attention.sequence_attention import AttentionSpec

AttentionOfHeads = Callable[[Tensor, Tensor, Tensor, Packing | PrefixPacking, AttentionSpec], Tensor]


@dataclass(frozen=True)
class SplitPacking:
    """Boundaries of the sequences of all ranks; rank r computes the r-th of S equal slices of their tokens."""

    packing: Packing | PrefixPacking
    group: dist.ProcessGroup

    @classmethod
    def over(cls, packing: Packing | PrefixPacking, num_tokens: int, group: dist.ProcessGroup) -> "SplitPacking":
        """Adds a padding sequence at the end if the ranks cannot split `num_tokens` equally."""
        padding = -num_tokens % group.size()
        if padding and isinstance(packing, PrefixPacking):
            packing = replace(packing, others=packing.others.with_extra_sequence(padding))
        elif padding:
            packing = packing.with_extra_sequence(padding)
        return cls(packing, group)

    def local_slice(self, column: Tensor) -> Tensor:
        """This rank's slice (C,) of a column over the tokens of all ranks; zero at padding."""
        padded = torch.nn.functional.pad(column, (0, -len(column) % self.group.size()))
        return padded.chunk(self.group.size())[self.group.rank()]


@torch.compiler.disable  # collectives
def attend_split(
    query: Tensor, key: Tensor, value: Tensor, split: SplitPacking, spec: AttentionSpec, attend: AttentionOfHeads
) -> Tensor:
    """(1, H, C, D), (1, K, C, D), (1, K, C, D) of this rank's tokens -> (1, C, H, D); `attend` runs on some heads."""
    size, rank = split.group.size(), split.group.rank()
    query_heads = query.shape[1] // size
    if spec.sinks is not None:
        spec = replace(spec, sinks=spec.sinks[rank * query_heads : (rank + 1) * query_heads])
    # repeat each key/value head for as many ranks as need it
    copies = size // math.gcd(key.shape[1], size)
    if copies > 1:
        key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    out = attend(*_tokens_for_heads([query, key, value], split.group), split.packing, spec)
    return _heads_for_tokens(out, split.group)


def _tokens_for_heads(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """(1, n, C, D), all heads of this rank's tokens -> (1, n / S, T, D), this rank's heads of all tokens."""
    size = group.size()
    per_rank = [
        x[0].transpose(0, 1).unflatten(1, (size, -1)).transpose(0, 1).flatten(2) for x in tensors
    ]  # (S, C, n/S * D)
    received = _AllToAll.apply(torch.cat(per_rank, 2), group).flatten(0, 1)  # (T, sum of n/S * D)
    parts = received.split([x.shape[2] for x in per_rank], 1)
    return [
        part.unflatten(1, (-1, x.shape[3])).transpose(0, 1).unsqueeze(0) for part, x in zip(parts, tensors, strict=True)
    ]


def _heads_for_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(1, T, H / S, D) -> (1, C, H, D)."""
    received = _AllToAll.apply(out[0].unflatten(0, (group.size(), -1)), group)  # (S, C, H / S, D)
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class PeerOutOfMemory(RuntimeError):
    """Another rank of the sequence-parallel group ran out of memory."""


_out_of_memory_groups: set[dist.ProcessGroup] = set()
_stops_with: dict[dist.ProcessGroup, dist.ProcessGroup] = {}


def stop_together(group: dist.ProcessGroup, whole: dist.ProcessGroup) -> None:
    """Where a rank of `group` runs out of memory, all of `whole` stop: they wait for each other elsewhere, too."""
    _stops_with[group] = whole


def check_peers(group: dist.ProcessGroup) -> None:
    """Returns if every rank of the group can go on to a collective; PeerOutOfMemory if one ran out of memory.

    A collective of the group, on the CPU, so that nothing waits for a device. After a failure it raises for the rest of
    the pass.
    """
    group = _stops_with.get(group, group)
    if group not in _out_of_memory_groups:
        any_failed = torch.zeros((), dtype=torch.int32)
        dist.all_reduce(any_failed, dist.ReduceOp.MAX, group)
        if any_failed:
            _out_of_memory_groups.add(group)
    if group in _out_of_memory_groups:
        raise PeerOutOfMemory("out of memory on a rank of the sequence-parallel group")


def has_stopped(group: dist.ProcessGroup) -> bool:
    """Whether a rank ran out of memory: until the next pass, the ranks of `group` do not exchange anything."""
    return _stops_with.get(group, group) in _out_of_memory_groups


def announce_out_of_memory(group: dist.ProcessGroup) -> dist.Work | None:
    """Makes the next `check_peers` of the other ranks raise PeerOutOfMemory, unless theirs made this rank's raise."""
    if group in _out_of_memory_groups:
        return None
    _out_of_memory_groups.add(group)
    return dist.all_reduce(torch.ones((), dtype=torch.int32), dist.ReduceOp.MAX, group, async_op=True)


def clear_out_of_memory(group: dist.ProcessGroup) -> None:
    """Forget the failure; called when a new pass begins."""
    _out_of_memory_groups.discard(group)


class _AllToAll(torch.autograd.Function):
    """Row s of (S, ...) goes to rank s; row s of the result comes from rank s. The backward is the same exchange."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        rows = rows.contiguous()
        received = torch.empty_like(rows)
        check_peers(group)
        dist.all_to_all_single(received, rows, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(gradient, ctx.group), None


def gather_tokens(slice_1CD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(1, T, D) of all ranks on every rank; backward reduce-scatters, so each token gets the gradients of all ranks."""
    return _AllGather.apply(slice_1CD[0], group).unsqueeze(0)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, slice_CD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = slice_CD.new_empty(group.size() * slice_CD.shape[0], *slice_CD.shape[1:])
        local = slice_CD.contiguous()
        check_peers(group)
        dist.all_gather_into_tensor(gathered, local, group=group)
        return gathered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        gathered = gradient.contiguous()
        check_peers(ctx.group)
        dist.reduce_scatter_tensor(part, gathered, group=ctx.group)
        return part, None


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of `values` over all ranks, for a loss that every rank computes from it in the same way.

    Each rank's gradient of its own part is then that of the sum, and backward needs no collective.
    """
    return _AllReduceSum.apply(values, group)


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        check_peers(group)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
