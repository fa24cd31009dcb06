"""Prefix sharing: prompts that several sequences begin with are computed once. Token layout and exact attention.

The computed tokens are laid out as prefixes | suffixes, group by group | other sequences. Prefixes and other sequences
attend to themselves; a suffix attends to the prefix of its group and to itself. For plain softmax attention, two flash
kernel calls compute the two parts and their log-sum-exp merges them. Otherwise each suffix follows a prefix copy.

Shapes: H query heads, K key/value heads, P tokens of all prefixes, S of all suffixes, T packed tokens, D head size.
"""

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.data.batch import Batch
from verl.data.shared_prompts import common_prefix, prompt_groups
from verl.models.attention.flash_kernels import Segments, flash, flash_backward
from verl.models.attention.packing import Packing, equal_length_runs
from verl.models.attention.sequence_attention import AttentionSpec, attend, attend_sequences

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefixPacking:
    """Boundaries of the prefixes, of each suffix, of the suffixes of each group, and of the other sequences."""

    prefixes: Packing
    suffixes: Packing
    groups: Packing  # group i: the suffixes that follow prefix i
    others: Packing
    max_length: int  # tokens of the longest sequence

    @property
    def sizes(self) -> list[int]:
        return [self.prefixes.num_tokens, self.suffixes.num_tokens, self.others.num_tokens]


@dataclass(frozen=True)
class PrefixLayout:
    """Which tokens of a batch are computed, and the index of every batch token among the computed ones."""

    packing: PrefixPacking | Packing
    computed: Tensor  # (U,) indices into the tokens of the batch
    computed_index: Tensor  # (T,) indices into the computed tokens


def prefix_sharing_order(batch: Batch) -> list[int]:
    """Sequence indices ordered so that sequences with the same prompt are adjacent and sorted by length."""
    lengths = batch.lengths.tolist()
    groups = [sorted(group, key=lengths.__getitem__) for group in prompt_groups(batch)]
    return [i for group in sorted(groups, key=lambda group: (len(group) == 1, lengths[group[0]])) for i in group]


def plan_prefix_sharing(batch: Batch, device: torch.device) -> PrefixLayout | None:
    """The layout of a batch that is in `prefix_sharing_order`; None if no two sequences have a common prompt."""
    lengths, starts = batch.lengths.tolist(), batch.cu_seqlens.tolist()
    groups = [(group, common_prefix(batch, group)) for group in prompt_groups(batch) if len(group) > 1]
    groups = [(group, prefix) for group, prefix in groups if prefix]
    if not groups:
        return None
    grouped = {i for group, _ in groups for i in group}
    others = [i for i in range(len(lengths)) if i not in grouped]
    suffixes = [[lengths[i] - prefix for i in group] for group, prefix in groups]
    packing = PrefixPacking(
        Packing.of_lengths([prefix for _, prefix in groups], device),
        Packing.of_lengths([length for group in suffixes for length in group if length], device),
        Packing.of_lengths([sum(group) for group in suffixes], device),
        Packing.of_lengths([lengths[i] for i in others], device),
        max(lengths),
    )
    spans = [(starts[group[0]], starts[group[0]] + prefix) for group, prefix in groups]
    spans += [(starts[i] + prefix, starts[i + 1]) for group, prefix in groups for i in group]
    spans += [(starts[i], starts[i + 1]) for i in others]
    computed = torch.cat([torch.arange(*span) for span in spans])
    computed_index = torch.empty(batch.num_tokens, dtype=torch.int64)
    computed_index[computed] = torch.arange(len(computed))
    for group, prefix in groups:
        for i in group[1:]:
            shared = computed_index[starts[group[0]] : starts[group[0]] + prefix]
            computed_index[starts[i] : starts[i] + prefix] = shared
    return PrefixLayout(packing, computed, computed_index)


def shared_beginnings(sequences: Sequence[Sequence[int]], max_group: int = 64) -> list[int]:
    """How many first tokens of each sequence to compute once for its group: groups are chosen to repeat the fewest.

    A group is a run of at most `max_group` neighbours in sorted order; its members begin with the same tokens.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i])
    common = [_common_length(sequences[a], sequences[b]) for a, b in pairwise(order)]
    best, starts = [0], [0]  # the most tokens saved among the first i of the order, and where the last group begins
    for stop in range(1, len(order) + 1):
        saved, shared, choice = best[stop - 1], len(sequences[order[stop - 1]]), stop - 1
        for start in range(stop - 2, max(stop - max_group, 0) - 1, -1):
            shared = min(shared, common[start])
            if best[start] + (stop - start - 1) * shared > saved:
                saved, choice = best[start] + (stop - start - 1) * shared, start
        best.append(saved)
        starts.append(choice)
    beginnings, stop = [0] * len(order), len(order)
    while stop:
        start = starts[stop]
        shared = min(common[start : stop - 1], default=0)
        for i in order[start:stop]:
            beginnings[i] = shared
        stop = start
    return beginnings


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    differing = (number for number, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differing, min(len(first), len(second)))


@torch.compiler.disable  # a compiled layer would have a graph for each pack
def attend_with_prefixes(
    query: Tensor, key: Tensor, value: Tensor, packing: PrefixPacking, spec: AttentionSpec
) -> Tensor:
    """(1, H, T, D), (1, K, T, D), (1, K, T, D) in the layout of `packing` -> (1, T, H, D)."""
    prefixes, suffixes, others = zip(*(x.split(packing.sizes, 2) for x in (query, key, value)), strict=True)
    out = [attend_sequences(*prefixes, packing.prefixes, spec)]
    if packing.suffixes.lengths:
        merged = _can_merge(query, value, packing, spec)
        attend_suffixes = _MergedAttention.apply if merged else _attend_suffix_rows
        out.append(attend_suffixes(*suffixes, *prefixes[1:], packing, spec))
    if packing.others.lengths:
        out.append(attend_sequences(*others, packing.others, spec))
    return torch.cat(out, 1)


def _attend_suffix_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    packing: PrefixPacking,
    spec: AttentionSpec,
) -> Tensor:
    """(1, S, H, D): each suffix attends to a copy of its visible prefix and to itself; equal lengths in one call."""
    in_groups = [x.split(list(packing.groups.lengths), 2) for x in (query, key, value)]
    prefix_parts = [x.split(list(packing.prefixes.lengths), 2) for x in (prefix_key, prefix_value)]
    out = []
    for runs, *suffixes, one_key, one_value in zip(_runs_by_group(packing), *in_groups, *prefix_parts, strict=True):
        visible = one_key.shape[2] if spec.window is None else min(one_key.shape[2], spec.window - 1)
        hidden = one_key.shape[2] - visible
        sizes = [count * length for count, length in runs]
        for (count, length), *parts in zip(runs, *(x[0].split(sizes, 1) for x in suffixes), strict=True):
            q, k, v = (part.unflatten(1, (count, length)).transpose(0, 1) for part in parts)
            k = torch.cat([one_key[:, :, hidden:].expand(count, -1, -1, -1), k], 2)
            v = torch.cat([one_value[:, :, hidden:].expand(count, -1, -1, -1), v], 2)
            out.append(attend(q, k, v, spec).transpose(1, 2).flatten(0, 1))
    return torch.cat(out).unsqueeze(0)


def _runs_by_group(packing: PrefixPacking) -> Iterator[list[tuple[int, int]]]:
    """(count, length) of neighbouring suffixes of equal length, for one group after the other."""
    lengths = iter(packing.suffixes.lengths)
    for group_tokens in packing.groups.lengths:
        members: list[int] = []
        while sum(members) < group_tokens:
            members.append(next(lengths))
        yield equal_length_runs(members)


# --- merging two flash kernel calls -----------------------------------------------------------------------------------


def _can_merge(query: Tensor, value: Tensor, packing: PrefixPacking, spec: AttentionSpec) -> bool:
    unlimited = spec.window is None or spec.window >= packing.max_length
    if not (spec.is_plain_softmax and unlimited) or spec.dropout or query.shape[-1] != value.shape[-1]:
        return False
    if query.device.type != "cpu" and query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return _merge_works(query.device.type, query.dtype, query.shape[-1])


@functools.cache
def _merge_works(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the flash kernels run here and agree with `_attend_suffix_rows`; tried once.

    The first call may come without gradients, or inside a checkpointed layer that counts saved tensors.
    """
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return _try_merge(device_type, dtype, head_dim)


def _try_merge(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    device = torch.device(device_type)
    packings = [Packing.of_lengths(lengths, device) for lengths in ((3,), (2, 2, 1), (5,), ())]
    packing, spec = PrefixPacking(*packings, max_length=5), AttentionSpec(None, 0.0, None, None, None)
    values = torch.linspace(-2, 2, 8 * head_dim).sin().view(1, 1, 8, head_dim).to(device, dtype)
    results = []
    for attend_suffixes in (_MergedAttention.apply, _attend_suffix_rows):
        query, key = torch.cat([values, -values], 1)[:, :, 3:].requires_grad_(), values.clone().requires_grad_()
        try:
            out = attend_suffixes(query, key[:, :, 3:], key[:, :, 3:], key[:, :, :3], key[:, :, :3], packing, spec)
            (out * out.detach().cos()).sum().backward()
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            logger.warning("flash kernels cannot be merged on %s in %s, copies instead: %s", device_type, dtype, error)
            return False
        results.append((out, query.grad, key.grad))
    if all(torch.allclose(a, b, atol=0.02) for a, b in zip(*results, strict=True)):
        return True
    logger.warning("merged flash kernels on %s in %s give wrong numbers; copies instead", device_type, dtype)
    return False


class _MergedAttention(torch.autograd.Function):
    """Softmax attention over prefix and suffix keys, with one kernel call for each part.

    With out_i and lse_i of the parts, lse = log(e^lse_1 + e^lse_2) and out = sum_i e^(lse_i - lse) out_i. A kernel's
    backward, given the merged out and lse, uses the probabilities e^(score - lse) of the whole row, so it is exact.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        prefix_key: Tensor,
        prefix_value: Tensor,
        packing: PrefixPacking,
        spec: AttentionSpec,
    ) -> Tensor:
        """(1, S, H, D) without copies of the prefixes."""
        to_prefixes = Segments(packing.groups, packing.prefixes, False, spec.scaling)
        to_suffixes = Segments(packing.suffixes, packing.suffixes, True, spec.scaling)
        prefix_part = flash(query, prefix_key, prefix_value, to_prefixes)
        suffix_part = flash(query, key, value, to_suffixes)
        lse = torch.logaddexp(prefix_part[1], suffix_part[1])  # (1, H, S)
        parts = [out * (part - lse).exp().unsqueeze(-1) for out, part in (prefix_part, suffix_part)]
        out = (parts[0] + parts[1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, out, lse)
        ctx.to_prefixes, ctx.to_suffixes = to_prefixes, to_suffixes
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, prefix_key, prefix_value, out, lse = ctx.saved_tensors
        merged = grad_out.transpose(1, 2), query, out, lse
        prefix_part = flash_backward(*merged, prefix_key, prefix_value, ctx.to_prefixes)
        suffix_part = flash_backward(*merged, key, value, ctx.to_suffixes)
        return prefix_part[0] + suffix_part[0], *suffix_part[1:], *prefix_part[1:], None, None
