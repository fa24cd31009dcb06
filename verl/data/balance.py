"""Assigns the sequences of a batch to data-parallel ranks and micro-batches.

All ranks run the same number of forward passes and wait for each other in each of them, so the time of a micro-step is
that of its most expensive micro-batch. Sequences are assigned so that the micro-batches of one micro-step cost nearly
the same on every rank.
The assignment is a pure function of the batch: the driver calls it once, or each rank of a torchrun job calls it.

Shapes: R ranks (or replicas of ranks), K micro-steps ("steps" below). A part is the micro-batch of one rank in a step.
"""

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching, check_longest, sequence_groups, split_lengths

MAX_IMBALANCE = 1.05  # highest ratio of most expensive part to mean part in a step, if the lengths allow it
_TOLERANCE = 0.002  # a step whose ratio is at most 1 + this is not improved further
_MAX_SWAPS = 200  # per step
_EXTRA_STEPS = 2  # larger numbers of steps that are tried after the first feasible one
_CROSS_STEP_MARGIN = 0.02  # swaps between steps are tried if the ratio is above MAX_IMBALANCE minus this
_MAX_PAIRS = 1 << 18  # pairs of sequences that are looked at for one swap
_BLOCK = (8192, 8)  # sequences and steps at least of a block: larger batches are balanced block by block
_CROSS_STEP_SEARCHES = 60  # searches for swaps between steps: this many plus one per step


@dataclass(frozen=True)
class Shard:
    """One rank's sequences of a batch: indices in ascending order, and how to split them into micro-batches."""

    indices: tuple[int, ...]
    micro: MicroBatching


def sequence_costs(lengths: Sequence[int], attention_length: float) -> np.ndarray:
    """(N,) cost of each sequence in tokens; attention doubles it at a length of `attention_length` tokens."""
    tokens = np.asarray(lengths, dtype=np.float64)
    return tokens + tokens**2 / attention_length


def assign_shards(
    batch: Batch, ranks: int, micro: MicroBatching, attention_length: float = float("inf"), balanced: bool = True
) -> list[Shard]:
    """One shard per rank, with the same number of micro-batches each; together they contain every sequence once.

    `balanced` minimises the sum of the most expensive parts of all micro-steps, within the limits of `micro`;
    otherwise sequences stay in order, with equally many per rank.
    A rank without a sequence for a micro-step has an empty part.
    """
    if ranks == 1:
        return [Shard(tuple(range(batch.num_sequences)), micro)]
    if micro.share_prefixes or micro.keep_groups:
        return _assign_groups(batch, ranks, micro, attention_length, balanced)
    lengths = batch.lengths.tolist()
    parts = _assign_micro_batches(lengths, sequence_costs(lengths, attention_length), ranks, micro, balanced)
    return [_make_shard(rank_parts, micro) for rank_parts in parts]


def _assign_groups(
    batch: Batch, ranks: int, micro: MicroBatching, attention_length: float, balanced: bool
) -> list[Shard]:
    """Like `assign_shards`; the sequences of a group stay together, and a shared prompt counts once."""
    groups = sequence_groups(batch, micro)
    costs = np.array([group.tokens + group.pairs / attention_length for group in groups])
    largest = max(len(group.indices) for group in groups)
    limits = MicroBatching(micro.max_tokens, micro.max_sequences and max(micro.max_sequences // largest, 1))
    parts = _assign_micro_batches([group.tokens for group in groups], costs, ranks, limits, balanced)
    return [
        _make_shard([[index for group in part for index in groups[group].indices] for part in rank_parts], micro)
        for rank_parts in parts
    ]


def _assign_micro_batches(
    lengths: list[int], costs: np.ndarray, ranks: int, micro: MicroBatching, balanced: bool
) -> list[list[list[int]]]:
    """The micro-batches of each rank."""
    if micro.max_tokens is not None:
        check_longest(max(lengths, default=0), micro.max_tokens)
    if balanced:
        steps = _balanced_blocks(lengths, costs, ranks, micro)
        parts = [[step[rank] for step in steps] for rank in range(ranks)]
    else:
        edges = [-(-len(lengths) * rank // ranks) for rank in range(ranks + 1)]
        parts = []
        for start, stop in pairwise(edges):
            parts.append([[start + i for i in part] for part in split_lengths(lengths[start:stop], micro)])
        num_steps = max(map(len, parts))
        parts = [[*rank_parts, *[[]] * (num_steps - len(rank_parts))] for rank_parts in parts]
    return parts


def _make_shard(parts: list[list[int]], micro: MicroBatching) -> Shard:
    indices = sorted(index for part in parts for index in part)
    place = {index: i for i, index in enumerate(indices)}
    plan = tuple(tuple(sorted(place[index] for index in part)) for part in parts)
    return Shard(tuple(indices), replace(micro, plan=plan))


Steps = list[list[list[int]]]  # (K, R) parts, each a list of sequence indices


def _balanced_blocks(lengths: list[int], costs: np.ndarray, ranks: int, micro: MicroBatching) -> Steps:
    """`_balanced_steps` of a batch; of a large one, of blocks like each other, so that the time grows with its size."""
    num_steps = _min_micro_steps(lengths, ranks, micro)
    count = max(min(len(lengths) // _BLOCK[0], num_steps // _BLOCK[1]), 1)
    steps: Steps = []
    order = np.argsort(-costs, kind="stable")
    for block in (np.sort(order[number::count]) for number in range(count)):
        block_steps = _balanced_steps([lengths[i] for i in block], costs[block], ranks, micro)
        steps += [[block[part].tolist() for part in step] for step in block_steps]
    return steps


def _balanced_steps(lengths: list[int], costs: np.ndarray, ranks: int, micro: MicroBatching) -> Steps:
    """The fewest steps whose parts cost nearly the same, or the most balanced of those tried.

    Three initial assignments are tried: largest first into equal parts, with parts of similar cost in one step; one
    step at a time around the most expensive remaining sequence; and first fit. Swaps improve each.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    limits, count = _Limits.of(micro), _min_micro_steps(lengths, ranks, micro)
    candidates: list[tuple[float, float, Steps]] = []
    last = sys.maxsize
    while count <= last:
        for initial_steps in (_largest_first, _around_most_expensive, _first_fit):
            if (steps := initial_steps(order, lengths, costs, (count, ranks), limits)) is None:
                continue
            steps = [step for step in steps if any(step)] or steps[:1]
            swaps = _Swaps(steps, np.asarray(lengths), costs, limits)
            imbalance = swaps.improve()
            if imbalance.worst_ratio <= MAX_IMBALANCE:
                return swaps.steps()
            candidates.append((round(imbalance.worst_ratio, 3), imbalance.total_cost, swaps.steps()))
            last = min(last, count + _EXTRA_STEPS)
        count += 1
    return min(candidates, key=lambda plan: plan[:2])[2]


def _min_micro_steps(lengths: list[int], ranks: int, micro: MicroBatching) -> int:
    """A lower bound on the number of micro-steps that have room for all sequences."""
    lower_bound = -(-len(lengths) // ((micro.max_sequences or max(len(lengths), 1)) * ranks))
    if micro.max_tokens is not None:
        over_half = sum(2 * length > micro.max_tokens for length in lengths)
        lower_bound = max(lower_bound, -(-sum(lengths) // (micro.max_tokens * ranks)), -(-over_half // ranks))
    return max(lower_bound, 1)


@dataclass(frozen=True)
class _Limits:
    tokens: float
    sequences: float

    @classmethod
    def of(cls, micro: MicroBatching) -> "_Limits":
        return cls(micro.max_tokens or float("inf"), micro.max_sequences or float("inf"))


def _largest_first(
    order: list[int], lengths: list[int], costs: np.ndarray, shape: tuple[int, int], limits: _Limits
) -> Steps | None:
    """Parts as equal as the limits allow; those of similar cost share a step. None if a sequence does not fit."""
    parts, remaining = _assign_to_cheapest(order, lengths, costs, shape[0] * shape[1], limits)
    return None if remaining else _group_by_cost(parts, costs, shape[1])


def _first_fit(
    order: list[int], lengths: list[int], costs: np.ndarray, shape: tuple[int, int], limits: _Limits
) -> Steps | None:
    """Each sequence in the first part with room, to use few parts; None if a sequence does not fit."""
    parts: list[list[int]] = [[] for _ in range(shape[0] * shape[1])]
    room = np.full(len(parts), limits.tokens)  # of a part with as many sequences as it may have: -1
    for i in order:
        place = int((room >= lengths[i]).argmax())
        if room[place] < lengths[i]:
            return None
        parts[place].append(i)
        room[place] = room[place] - lengths[i] if len(parts[place]) < limits.sequences else -1
    return _group_by_cost(parts, costs, shape[1])


def _group_by_cost(parts: list[list[int]], costs: np.ndarray, ranks: int) -> Steps:
    parts.sort(key=lambda part: (-costs[part].sum(), part))
    return [parts[start : start + ranks] for start in range(0, len(parts), ranks)]


def _around_most_expensive(
    order: list[int], lengths: list[int], costs: np.ndarray, shape: tuple[int, int], limits: _Limits
) -> Steps | None:
    """Parts up to the most expensive remaining sequence or an equal share, step by step; None if one does not fit."""
    count, ranks = shape
    steps: Steps = []
    for number in range(count):
        share = costs[order].sum() / ((count - number) * ranks)
        max_cost = max(share, costs[order[0]]) if order and number < count - 1 else float("inf")
        parts, order = _assign_to_cheapest(order, lengths, costs, ranks, limits, max_cost * (1 + _TOLERANCE))
        steps.append(parts)
        if sum(lengths[i] for i in order) > (count - number - 1) * ranks * limits.tokens:
            return None
    return None if order else steps


def _assign_to_cheapest(
    order: list[int], lengths: list[int], costs: np.ndarray, count: int, limits: _Limits, max_cost: float = float("inf")
) -> tuple[list[list[int]], list[int]]:
    """(`count` parts, sequences that fit none): each sequence of `order` goes to the cheapest part with room.

    No part costs more than `max_cost`.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, remaining = [0] * count, []
    shortest = min((lengths[i] for i in order), default=0)
    heap = [(0.0, number) for number in range(count)]
    for i in order:
        popped, cost_i = [], float(costs[i])
        while heap and heap[0][0] + cost_i <= max_cost:
            cost, number = heapq.heappop(heap)
            if tokens[number] + lengths[i] <= limits.tokens and len(parts[number]) < limits.sequences:
                popped.append((cost + cost_i, number))
                parts[number].append(i)
                tokens[number] += lengths[i]
                break
            popped.append((cost, number))
        else:
            remaining.append(i)
            if max_cost == float("inf"):  # then the caller has no use for the others
                break
        for cost, number in popped:  # but for those that nothing fits any more
            if tokens[number] + shortest <= limits.tokens and len(parts[number]) < limits.sequences:
                heapq.heappush(heap, (cost, number))
    return parts, remaining


class _Imbalance(NamedTuple):
    worst_ratio: float  # highest ratio of the most expensive part to the mean part, of all steps
    total_cost: float  # sum of the most expensive parts of all steps


class _Swaps:
    """Moves a sequence to another part, or swaps two, while that makes the most uneven step more even.

    Every part also has an empty slot of cost 0: a swap with it is a move. How uneven a step is: the sum of the squared
    costs of its parts over their squared mean.
    """

    def __init__(self, steps: Steps, lengths: np.ndarray, costs: np.ndarray, limits: _Limits):
        parts = [part for step in steps for part in step]
        slots = np.zeros(len(parts))
        self.shape, self.limits, self.num_sequences = (len(steps), len(steps[0])), limits, len(lengths)
        self.costs, self.lengths = np.append(costs / costs.sum(), slots), np.append(lengths, slots)
        self.counts = np.append(np.ones(len(lengths)), slots)
        self.part_of = np.append(np.zeros(len(lengths), dtype=int), np.arange(len(parts)))
        for number, part in enumerate(parts):
            self.part_of[part] = number

    def steps(self) -> Steps:
        """The current parts."""
        out: Steps = [[[] for _ in range(self.shape[1])] for _ in range(self.shape[0])]
        for i, part in enumerate(self.part_of[: self.num_sequences].tolist()):
            out[part // self.shape[1]][part % self.shape[1]].append(i)
        return out

    def part_costs(self) -> np.ndarray:
        """(K, R) cost of each part."""
        return np.bincount(self.part_of, self.costs, self.shape[0] * self.shape[1]).reshape(self.shape)

    def improve(self) -> _Imbalance:
        """Swap in place until no swap helps; how uneven the parts (`steps`) then are."""
        finished: set[int] = set()
        searches = _CROSS_STEP_SEARCHES + self.shape[0]
        for _ in range(_MAX_SWAPS * self.shape[0]):
            ratios = self.ratios()
            step = max(set(range(len(ratios))) - finished, key=ratios.__getitem__, default=-1)
            if step < 0 or ratios[step] <= 1 + _TOLERANCE:
                break
            changed = self._make_best_swap(step, [step])
            if not changed and ratios[step] > MAX_IMBALANCE - _CROSS_STEP_MARGIN and searches > 0:
                searches -= 1
                changed = self._make_best_swap(step, range(len(ratios)))
            finished = finished - changed if changed else finished | {step}
        return _Imbalance(float(self.ratios().max()), float(self.part_costs().max(1).sum()))

    def ratios(self) -> np.ndarray:
        """(K,) most expensive part over the mean part."""
        part_costs = self.part_costs()
        means = part_costs.mean(1)
        return np.divide(part_costs.max(1), means, out=np.ones_like(means), where=means > 0)

    def _make_best_swap(self, step: int, others: Sequence[int]) -> set[int]:
        """Make the best swap between `step` and `others`; the steps that changed, empty if no swap helps."""
        ranks, part_costs = self.shape[1], self.part_costs()
        a = np.flatnonzero(self.part_of // ranks == step)
        b = np.flatnonzero(np.isin(self.part_of // ranks, others))
        if len(a) * len(b) > _MAX_PAIRS:  # the most expensive part of the step, and the cheapest of all
            a = np.flatnonzero(self.part_of == step * ranks + part_costs[step].argmax())
            cheapest_first = np.argsort(part_costs.ravel()[self.part_of[b]], kind="stable")
            b = b[cheapest_first[: max(_MAX_PAIRS // len(a), 1)]]
        p, q = self.part_of[a][:, None], self.part_of[b][None]
        allowed = p != q
        for size, limit in ((self.lengths, self.limits.tokens), (self.counts, self.limits.sequences)):
            totals, moved = np.bincount(self.part_of, size), size[a][:, None] - size[b][None]
            allowed &= (totals[p] - moved <= limit) & (totals[q] + moved <= limit)
        moved, j, flat = self.costs[a][:, None] - self.costs[b][None], q // ranks, part_costs.ravel()
        squares, means = (part_costs**2).sum(1), part_costs.mean(1)
        p_change, q_change = moved * (moved - 2 * flat[p]), moved * (moved + 2 * flat[q])
        before = _unevenness(squares, means)
        within = before[step] - _unevenness(squares[step] + p_change + q_change, means[step])
        across = before[step] - _unevenness(squares[step] + p_change, means[step] - moved / ranks)
        across += before[j] - _unevenness(squares[j] + q_change, means[j] + moved / ranks)
        gain = np.where(allowed, np.where(j == step, within, across), -np.inf)
        i, k = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[i, k] <= _TOLERANCE**2:
            return set()
        self.part_of[a[i]], self.part_of[b[k]] = q[0, k], p[i, 0]
        self.part_of[self.num_sequences :] = np.arange(len(flat))
        return {step, int(j[0, k])}


def _unevenness(squares: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Sum of the squared costs of parts over their squared mean; infinite for an empty step."""
    empty = means < 1e-9
    return np.where(empty, np.inf, np.abs(squares) / np.where(empty, 1.0, means) ** 2)
