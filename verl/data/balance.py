"""Which data-parallel rank trains on which sequences, and in which micro-batch.

All ranks make the same number of forwards and wait for each other in every one of them, so what counts is the dearest
micro-batch of each micro-step: sequences are dealt out so that those of one step cost nearly the same on every rank.
A pure function of the lengths: the driver calls it, or every rank of a torchrun job for itself.

Shapes: R ranks (or replicas of ranks), K micro-steps.
"""

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from verl.data.batch import Batch
from verl.data.packing import MicroBatching, cut, sharing_units

EVEN = 1.05  # the dearest part of a step over their mean, where the lengths allow it
_CLOSE = 0.002  # a step whose dearest part is this near to the mean is not improved further
_SWAPS = 200  # per step, at most
_MORE = 2  # micro-steps that are tried beyond the first number that works
_FEW = 12  # sequences of two parts, at most, that are shared out in every way
_NORM = 16.0  # the higher, the more the dearest part counts
_MARGIN = 0.02  # within which of that a step asks no other step for help
_SEARCHES = 60  # among all steps, besides one for each


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
    """The fewest steps whose parts cost nearly the same, or the most even of those tried.

    They begin in three ways: as equal parts, those of like cost in one step; and, where the budget leaves no room for
    that, step by step around the dearest sequence left, or filled up one after the other. Then sequences move and
    change places, see `_Evening`.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    limits, count = _Limits.of(micro), _fewest(lengths, ranks, micro)
    found: list[tuple[float, float, Steps]] = []
    last = sys.maxsize
    while count <= last:
        for begin in (_alike, _around_the_dearest, _tight):
            if (steps := begin(order, lengths, costs, (count, ranks), limits)) is None:
                continue
            steps = [step for step in steps if any(step)] or steps[:1]
            evening = _Evening(steps, np.asarray(lengths), costs, limits)
            worst, time = evening.run()
            if worst <= EVEN:
                return evening.steps()
            found.append((round(worst, 3), time, evening.steps()))
            last = min(last, count + _MORE)
        count += 1
    return min(found, key=lambda plan: plan[:2])[2]


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


def _alike(
    order: list[int], lengths: list[int], costs: np.ndarray, shape: tuple[int, int], limits: _Limits
) -> Steps | None:
    """Equal parts as far as the limits allow; those of like cost share a step. None where there is no room."""
    parts, left = _deal(order, lengths, costs, shape[0] * shape[1], limits)
    return None if left else _by_cost(parts, costs, shape[1])


def _tight(
    order: list[int], lengths: list[int], costs: np.ndarray, shape: tuple[int, int], limits: _Limits
) -> Steps | None:
    """Each sequence in the first part that has room, the way that needs the fewest; None where there is none."""
    parts: list[list[int]] = [[] for _ in range(shape[0] * shape[1])]
    tokens = [0] * len(parts)
    for i in order:
        fitting = (n for n, part in enumerate(parts) if len(part) < limits.sequences)
        place = next((n for n in fitting if tokens[n] + lengths[i] <= limits.tokens), None)
        if place is None:
            return None
        parts[place].append(i)
        tokens[place] += lengths[i]
    return _by_cost(parts, costs, shape[1])


def _by_cost(parts: list[list[int]], costs: np.ndarray, ranks: int) -> Steps:
    parts.sort(key=lambda part: (-costs[part].sum(), part))
    return [parts[start : start + ranks] for start in range(0, len(parts), ranks)]


def _around_the_dearest(
    order: list[int], lengths: list[int], costs: np.ndarray, shape: tuple[int, int], limits: _Limits
) -> Steps | None:
    """Each step as dear as the dearest sequence left, or as an equal share; None where the last has no room."""
    count, ranks = shape
    steps: Steps = []
    for number in range(count):
        share = costs[order].sum() / ((count - number) * ranks)
        most = max(share, costs[order[0]]) if order and number < count - 1 else float("inf")
        parts, order = _deal(order, lengths, costs, ranks, limits, most * (1 + _CLOSE))
        steps.append(parts)
    return None if order else steps


def _deal(
    order: list[int], lengths: list[int], costs: np.ndarray, count: int, limits: _Limits, most: float = float("inf")
) -> tuple[list[list[int]], list[int]]:
    """`order` dealt out to `count` parts, each to the cheapest so far that has room; and those that none has room for.

    No part costs more than `most`.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, left = [0] * count, []
    heap = [(0.0, number) for number in range(count)]
    for i in order:
        passed = []
        while heap and heap[0][0] + costs[i] <= most:
            spent, number = heapq.heappop(heap)
            passed.append((spent, number))
            if tokens[number] + lengths[i] <= limits.tokens and len(parts[number]) < limits.sequences:
                passed[-1] = (spent + float(costs[i]), number)
                parts[number].append(i)
                tokens[number] += lengths[i]
                break
        else:
            left.append(i)
        for entry in passed:
            heapq.heappush(heap, entry)
    return parts, left


def _least(lengths: np.ndarray, costs: np.ndarray, ranks: int, limits: _Limits) -> np.ndarray:
    """(N,) dearest part over mean in the step of each sequence: it cannot be less than this.

    The other ranks fill their tokens with the dearest sequences, the last one cut, and cost no more than this one.
    """
    if limits.tokens == float("inf"):
        return np.ones(len(lengths))
    order = np.argsort(-lengths, kind="stable")
    ends, sums = np.cumsum(np.append(0, lengths[order])), np.cumsum(np.append(0, costs[order]))
    starts = np.empty(len(lengths))
    starts[order] = ends[:-1]
    among = starts < limits.tokens
    filled = np.interp(limits.tokens + lengths * among, ends, sums) - costs * among
    return ranks * costs / (costs + (ranks - 1) * np.minimum(costs, filled))


class _Evening:
    """Sequences move, or change places with another, while that makes their steps more even.

    Every part also has a place with nothing in it: changing places with that is a move. A step is as uneven as the
    `_NORM`-norm of its parts over their mean, which is near the dearest one over the mean but feels the others too; all
    over the least that this can be with its sequences.
    """

    def __init__(self, steps: Steps, lengths: np.ndarray, costs: np.ndarray, limits: _Limits):
        parts = [part for step in steps for part in step]
        nothing = np.zeros(len(parts))
        self.shape, self.limits, self.number = (len(steps), len(steps[0])), limits, len(lengths)
        self.costs, self.lengths = np.append(costs / costs.sum(), nothing), np.append(lengths, nothing)
        self.counts = np.append(np.ones(len(lengths)), nothing)
        self.least = _least(lengths, costs, self.shape[1], limits)
        self.part = np.append(np.zeros(len(lengths), dtype=int), np.arange(len(parts)))
        for number, part in enumerate(parts):
            self.part[part] = number

    def steps(self) -> Steps:
        """The parts as they are now."""
        own: Steps = [[[] for _ in range(self.shape[1])] for _ in range(self.shape[0])]
        for i, part in enumerate(self.part[: self.number].tolist()):
            own[part // self.shape[1]][part % self.shape[1]].append(i)
        return own

    def spent(self) -> np.ndarray:
        """(K, R) cost of every part."""
        return np.bincount(self.part, self.costs, self.shape[0] * self.shape[1]).reshape(self.shape)

    def run(self) -> tuple[float, float]:
        """How uneven the worst step is, and the sum of the dearest part of each, when nothing helps any more."""
        done: set[int] = set()
        searches = _SEARCHES + self.shape[0]
        for _ in range(_SWAPS * self.shape[0]):
            spent = self.spent()
            uneven, _ = self.ratios(spent)
            step = max((k for k in range(len(spent)) if k not in done), key=uneven.__getitem__, default=-1)
            if step < 0 or uneven[step] <= 1 + _CLOSE:
                break
            changed = self._improve(step, spent, [step])
            changed = changed or self._split_again(step, spent)
            if not changed and uneven[step] > EVEN - _MARGIN and searches > 0:
                searches -= 1
                changed = self._improve(step, spent, range(len(spent)))
            done = done - changed if changed else done | {step}
        spent = self.spent()
        return float(self.ratios(spent)[0].max()), float(spent.max(1).sum())

    def ratios(self, spent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(K,) dearest part over the mean, over the least it can be with such sequences; and that."""
        least, means = np.ones(len(spent)), spent.mean(1)
        np.maximum.at(least, self.part[: self.number] // self.shape[1], self.least)
        return np.where(means > 0, spent.max(1), 1.0) / np.where(means > 0, means, 1.0) / least, least

    def _improve(self, step: int, spent: np.ndarray, others: Sequence[int]) -> set[int]:
        """Make the best change of places between `step` and `others`; the steps that changed, none if nothing helps."""
        ranks = self.shape[1]
        a = np.flatnonzero(self.part // ranks == step)
        b = np.flatnonzero(np.isin(self.part // ranks, others))
        p, q = self.part[a][:, None], self.part[b][None]
        allowed = p != q
        for size, limit in ((self.lengths, self.limits.tokens), (self.counts, self.limits.sequences)):
            there, moved = np.bincount(self.part, size), size[a][:, None] - size[b][None]
            allowed &= (there[p] - moved <= limit) & (there[q] + moved <= limit)
        moved, same, j = self.costs[a][:, None] - self.costs[b][None], q // ranks == step, q // ranks
        weights, means, flat = self.ratios(spent)[1] ** -_NORM, spent.mean(1), spent.ravel()
        sums = (spent**_NORM).sum(1) * weights
        less = ((flat[p] - moved) ** _NORM - flat[p] ** _NORM) * weights[step]
        more = ((flat[q] + moved) ** _NORM - flat[q] ** _NORM) * weights[j]
        before = _uneven(sums, means)
        alone = _uneven(sums[step] + less + more, means[step])
        apart = _uneven(sums[step] + less, means[step] - moved / ranks)
        apart += _uneven(sums[j] + more, means[j] + moved / ranks)
        gain = np.where(same, before[step] - alone, before[step] + before[j] - apart)
        gain[~allowed] = -np.inf
        i, k = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[i, k] <= _CLOSE**2:
            return set()
        self.part[a[i]], self.part[b[k]] = q[0, k], p[i, 0]
        self.part[self.number :] = np.arange(len(flat))
        return {step, int(j[0, k])}

    def _split_again(self, step: int, spent: np.ndarray) -> set[int]:
        """Share the sequences of the dearest part and another of its step in the best of all ways, if they are few."""
        first, sizes = step * self.shape[1], np.stack([self.costs, self.lengths, self.counts])
        dear = first + int(spent[step].argmax())
        found: list[tuple[float, np.ndarray, np.ndarray]] = []
        for other in range(first, first + self.shape[1]):
            rows = np.flatnonzero(np.isin(self.part[: self.number], (dear, other)))
            if other == dear or len(rows) > _FEW:
                continue
            given = np.arange(2 ** len(rows))[:, None] >> np.arange(len(rows)) & 1
            both = np.stack([sizes[:, rows] @ given.T, sizes[:, rows] @ (1 - given.T)])  # (2, 3, ways)
            most, rest = both.max(0), np.delete(spent[step], (dear - first, other - first))
            fits = (most[1] <= self.limits.tokens) & (most[2] <= self.limits.sequences)
            powers = np.where(fits, (both[:, 0] ** _NORM).sum(0) + (rest**_NORM).sum(), np.inf)
            found.append((float(powers.min()), rows, np.where(given[powers.argmin()], other, dear)))
        if not found:
            return set()
        least, rows, owners = min(found, key=lambda way: way[0])
        if (spent[step] ** _NORM).sum() - least <= _CLOSE**2 * spent[step].mean() ** _NORM:
            return set()
        self.part[rows] = owners
        return {step}


def _uneven(sums: np.ndarray, means: np.ndarray) -> np.ndarray:
    """How far parts, given by the sum of their powers, are from their mean; infinite where there is nothing."""
    empty = means < 1e-9
    return np.where(empty, np.inf, np.abs(sums) / np.where(empty, 1.0, means) ** _NORM)
