"""Which data-parallel rank trains on which sequences, and in which micro-batch.

All ranks make the same number of forwards and wait for each other in every one of them, so what counts is the dearest
micro-batch of each micro-step: sequences are dealt out so that those of one step cost nearly the same on every rank.
A pure function of the lengths: the driver calls it, or every rank of a torchrun job for itself.

Shapes: R ranks (or replicas of ranks), K micro-steps.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from verl.data.batch import Batch
from verl.data.packing import MicroBatching, cut, sharing_units

_CLOSE = 0.002  # a step whose dearest part is this near to the mean is not improved further
_SWAPS = 200  # per step, at most


@dataclass(frozen=True)
class Shard:
    """One rank's part of a batch: sequence numbers in ascending order, and how to cut them."""

    rows: tuple[int, ...]
    micro: MicroBatching


def costs_of(lengths: Sequence[int], attention_length: float) -> np.ndarray:
    """(N,) work of each sequence in tokens; attention doubles it for a sequence of `attention_length` tokens."""
    tokens = np.asarray(lengths, dtype=np.float64)
    return tokens + tokens**2 / attention_length


def spread(
    batch: Batch, ranks: int, micro: MicroBatching, attention_length: float = float("inf"), balanced: bool = True
) -> list[Shard]:
    """A shard per rank; together they hold every sequence once, each with the same number of micro-batches.

    `balanced` minimises the time of the dearest rank over all micro-steps within the limits of `micro`; otherwise
    sequences stay in order, equally many per rank. Ranks without a sequence for a micro-step have an empty part.
    """
    if ranks == 1:
        return [Shard(tuple(range(batch.num_sequences)), micro)]
    if micro.share_prefixes:
        return _spread_units(batch, ranks, micro, attention_length, balanced)
    lengths = batch.lengths.tolist()
    parts = _parts_of(lengths, costs_of(lengths, attention_length), ranks, micro, balanced)
    return [_shard(own, micro) for own in parts]


def _spread_units(
    batch: Batch, ranks: int, micro: MicroBatching, attention_length: float, balanced: bool
) -> list[Shard]:
    """Sequences with the same prompt stay together, which counts once."""
    units = sharing_units(batch, micro.max_tokens, micro.max_sequences)
    costs = np.array([unit.tokens + unit.pairs / attention_length for unit in units])
    largest = max(len(unit.rows) for unit in units)
    limits = MicroBatching(micro.max_tokens, micro.max_sequences and max(micro.max_sequences // largest, 1))
    parts = _parts_of([unit.tokens for unit in units], costs, ranks, limits, balanced)
    return [_shard([[row for unit in part for row in units[unit].rows] for part in own], micro) for own in parts]


def _parts_of(
    lengths: list[int], costs: np.ndarray, ranks: int, micro: MicroBatching, balanced: bool
) -> list[list[list[int]]]:
    """The micro-batches of each rank."""
    cut(lengths, micro)  # refuses a sequence over the budget
    if balanced:
        steps = _even_steps(lengths, costs, ranks, micro)
        parts = [[step[rank] for step in steps] for rank in range(ranks)]
    else:
        edges = [-(-len(lengths) * rank // ranks) for rank in range(ranks + 1)]
        parts = []
        for start, stop in pairwise(edges):
            parts.append([[start + i for i in part] for part in cut(lengths[start:stop], micro)])
        most = max(map(len, parts))
        parts = [[*own, *[[]] * (most - len(own))] for own in parts]
    return parts


def _shard(parts: list[list[int]], micro: MicroBatching) -> Shard:
    rows = sorted(row for part in parts for row in part)
    place = {row: i for i, row in enumerate(rows)}
    plan = tuple(tuple(sorted(place[row] for row in part)) for part in parts)
    return Shard(tuple(rows), replace(micro, plan=plan))


Steps = list[list[list[int]]]  # (K, R) lists of sequence numbers


def _even_steps(lengths: list[int], costs: np.ndarray, ranks: int, micro: MicroBatching) -> Steps:
    """Equal parts as far as the limits allow, the fewest there can be; those of like cost share a step, dearest first.

    Then sequences move between the parts of a step until they cost the same.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    limits, count = _Limits.of(micro), _fewest(lengths, ranks, micro)
    while (parts := _deal(order, lengths, costs, count * ranks, limits)) is None:
        count += 1
    parts.sort(key=lambda part: (-costs[part].sum(), part))
    steps = [parts[start : start + ranks] for start in range(0, len(parts), ranks)]
    return [_levelled(step, np.asarray(lengths), costs, limits) for step in steps]


def _fewest(lengths: list[int], ranks: int, micro: MicroBatching) -> int:
    """No fewer micro-steps than this can hold everything."""
    wanted = -(-len(lengths) // ((micro.max_sequences or max(len(lengths), 1)) * ranks))
    if micro.max_tokens is not None:
        alone = sum(2 * length > micro.max_tokens for length in lengths)
        wanted = max(wanted, -(-sum(lengths) // (micro.max_tokens * ranks)), -(-alone // ranks))
    return max(wanted, 1)


@dataclass(frozen=True)
class _Limits:
    tokens: float
    sequences: float

    @classmethod
    def of(cls, micro: MicroBatching) -> "_Limits":
        return cls(micro.max_tokens or float("inf"), micro.max_sequences or float("inf"))


def _deal(
    order: list[int], lengths: list[int], costs: np.ndarray, count: int, limits: _Limits
) -> list[list[int]] | None:
    """`order` dealt out to `count` parts, each to the cheapest so far that has room; None where none has."""
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    heap = [(0.0, number) for number in range(count)]
    for i in order:
        passed = []
        while heap:
            spent, number = heapq.heappop(heap)
            if tokens[number] + lengths[i] <= limits.tokens and len(parts[number]) < limits.sequences:
                break
            passed.append((spent, number))
        else:
            return None
        parts[number].append(i)
        tokens[number] += lengths[i]
        for entry in (*passed, (spent + float(costs[i]), number)):
            heapq.heappush(heap, entry)
    return parts


def _levelled(parts: list[list[int]], lengths: np.ndarray, costs: np.ndarray, limits: _Limits) -> list[list[int]]:
    """The parts after moves and swaps, each of which makes the dearest of two cheaper."""
    spent = np.array([costs[part].sum() for part in parts])
    for _ in range(_SWAPS):
        dear = int(spent.argmax())
        if spent[dear] <= spent.mean() * (1 + _CLOSE):
            break
        for cheap in np.argsort(spent, kind="stable").tolist():
            if cheap != dear and (swap := _best_swap(parts[dear], parts[cheap], lengths, costs, limits)) is not None:
                out, back = swap
                parts[dear].remove(out)
                parts[cheap].append(out)
                if back is not None:
                    parts[cheap].remove(back)
                    parts[dear].append(back)
                spent[dear], spent[cheap] = costs[parts[dear]].sum(), costs[parts[cheap]].sum()
                break
        else:
            break
    return parts


def _best_swap(
    dear: list[int], cheap: list[int], lengths: np.ndarray, costs: np.ndarray, limits: _Limits
) -> tuple[int, int | None] | None:
    """(sequence that leaves `dear`, the one that comes back or None); None where nothing helps."""
    gap = costs[dear].sum() - costs[cheap].sum()
    back_costs, back_lengths = np.append(costs[cheap], 0.0), np.append(lengths[cheap], 0)
    gain = costs[dear][:, None] - back_costs[None]
    moved = lengths[dear][:, None] - back_lengths[None]
    allowed = (gain > gap * 1e-3) & (gain < gap * (1 - 1e-3))
    allowed &= (lengths[cheap].sum() + moved <= limits.tokens) & (lengths[dear].sum() - moved <= limits.tokens)
    allowed[:, -1] &= len(cheap) + 1 <= limits.sequences
    if not allowed.any():
        return None
    miss = np.where(allowed, np.abs(gain - gap / 2), np.inf)
    out, back = np.unravel_index(int(miss.argmin()), miss.shape)
    return dear[out], cheap[back] if back < len(cheap) else None
