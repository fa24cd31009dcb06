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

import numpy as np

from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching, prefix_groups, split_lengths

MAX_IMBALANCE = 1.05  # highest ratio of most expensive part to mean part in a step, if the lengths allow it
_TOLERANCE = 0.002  # a step whose ratio is at most 1 + this is not improved further
_MAX_SWAPS = 200  # per step
_EXTRA_STEPS = 2  # larger numbers of steps that are tried after the first feasible one
_MAX_ENUMERATED = 12  # two parts with at most this many sequences are split by exhaustive search
_POWER = 16.0  # exponent of the norm of part costs; a higher one approaches the maximum
_CROSS_STEP_MARGIN = 0.02  # swaps between steps are tried if the ratio is above MAX_IMBALANCE minus this
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
    if micro.share_prefixes:
        return _assign_prefix_groups(batch, ranks, micro, attention_length, balanced)
    lengths = batch.lengths.tolist()
    parts = _assign_micro_batches(lengths, sequence_costs(lengths, attention_length), ranks, micro, balanced)
    return [_make_shard(rank_parts, micro) for rank_parts in parts]


def _assign_prefix_groups(
    batch: Batch, ranks: int, micro: MicroBatching, attention_length: float, balanced: bool
) -> list[Shard]:
    """Like `assign_shards`; sequences with the same prompt stay together and the prompt counts once."""
    groups = prefix_groups(batch, micro.max_tokens, micro.max_sequences)
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
    split_lengths(lengths, micro)  # ConfigError for a sequence over the budget
    if balanced:
        steps = _balanced_steps(lengths, costs, ranks, micro)
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


def _balanced_steps(lengths: list[int], costs: np.ndarray, ranks: int, micro: MicroBatching) -> Steps:
    """The fewest steps whose parts cost nearly the same, or the most balanced of those tried.

    Three initial assignments are tried: largest first into equal parts, with parts of similar cost in one step; one
    step at a time around the most expensive remaining sequence; and first fit. `_LocalSearch` improves each.
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
            search = _LocalSearch(steps, np.asarray(lengths), costs, limits)
            worst_ratio, total_cost = search.run()
            if worst_ratio <= MAX_IMBALANCE:
                return search.steps()
            candidates.append((round(worst_ratio, 3), total_cost, search.steps()))
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
    tokens = [0] * len(parts)
    for i in order:
        not_full = (n for n, part in enumerate(parts) if len(part) < limits.sequences)
        place = next((n for n in not_full if tokens[n] + lengths[i] <= limits.tokens), None)
        if place is None:
            return None
        parts[place].append(i)
        tokens[place] += lengths[i]
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
    return None if order else steps


def _assign_to_cheapest(
    order: list[int], lengths: list[int], costs: np.ndarray, count: int, limits: _Limits, max_cost: float = float("inf")
) -> tuple[list[list[int]], list[int]]:
    """(`count` parts, sequences that fit none): each sequence of `order` goes to the cheapest part with room.

    No part costs more than `max_cost`.
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    tokens, remaining = [0] * count, []
    heap = [(0.0, number) for number in range(count)]
    for i in order:
        popped = []
        while heap and heap[0][0] + costs[i] <= max_cost:
            cost, number = heapq.heappop(heap)
            popped.append((cost, number))
            if tokens[number] + lengths[i] <= limits.tokens and len(parts[number]) < limits.sequences:
                popped[-1] = (cost + float(costs[i]), number)
                parts[number].append(i)
                tokens[number] += lengths[i]
                break
        else:
            remaining.append(i)
        for entry in popped:
            heapq.heappush(heap, entry)
    return parts, remaining


def _min_ratios(lengths: np.ndarray, costs: np.ndarray, ranks: int, limits: _Limits) -> np.ndarray:
    """(N,) lower bound, for the step of each sequence, of the ratio of its most expensive part to its mean part.

    In the bound, the other ranks fill their token budget with the most expensive sequences, the last one cut, and
    cost no more than this one.
    """
    if limits.tokens == float("inf"):
        return np.ones(len(lengths))
    order = np.argsort(-lengths, kind="stable")
    ends, sums = np.cumsum(np.append(0, lengths[order])), np.cumsum(np.append(0, costs[order]))
    starts = np.empty(len(lengths))
    starts[order] = ends[:-1]
    is_filler = starts < limits.tokens
    filled = np.interp(limits.tokens + lengths * is_filler, ends, sums) - costs * is_filler
    return ranks * costs / (costs + (ranks - 1) * np.minimum(costs, filled))


class _LocalSearch:
    """Local search: moves a sequence to another part, or swaps two, while that makes their steps more balanced.

    Every part also has an empty slot of cost 0: a swap with it is a move. The imbalance of a step is the
    `_POWER`-norm of its part costs, divided by their mean and by the step's lower bound (`_min_ratios`). This norm is
    close to the maximum but also depends on the other parts.
    """

    def __init__(self, steps: Steps, lengths: np.ndarray, costs: np.ndarray, limits: _Limits):
        parts = [part for step in steps for part in step]
        empty_slots = np.zeros(len(parts))
        self.shape, self.limits, self.num_sequences = (len(steps), len(steps[0])), limits, len(lengths)
        self.costs, self.lengths = np.append(costs / costs.sum(), empty_slots), np.append(lengths, empty_slots)
        self.counts = np.append(np.ones(len(lengths)), empty_slots)
        self.min_ratios = _min_ratios(lengths, costs, self.shape[1], limits)
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

    def run(self) -> tuple[float, float]:
        """Improve until no swap helps; (highest ratio of a step, sum of the most expensive parts of all steps)."""
        finished: set[int] = set()
        searches = _CROSS_STEP_SEARCHES + self.shape[0]
        for _ in range(_MAX_SWAPS * self.shape[0]):
            part_costs = self.part_costs()
            ratios, _ = self.ratios(part_costs)
            step = max((k for k in range(len(part_costs)) if k not in finished), key=ratios.__getitem__, default=-1)
            if step < 0 or ratios[step] <= 1 + _TOLERANCE:
                break
            changed = self._apply_best_swap(step, part_costs, [step])
            changed = changed or self._repartition_pair(step, part_costs)
            if not changed and ratios[step] > MAX_IMBALANCE - _CROSS_STEP_MARGIN and searches > 0:
                searches -= 1
                changed = self._apply_best_swap(step, part_costs, range(len(part_costs)))
            finished = finished - changed if changed else finished | {step}
        part_costs = self.part_costs()
        return float(self.ratios(part_costs)[0].max()), float(part_costs.max(1).sum())

    def ratios(self, part_costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(K,) most expensive part over the mean part, divided by its lower bound; and (K,) that lower bound."""
        lower_bounds, means = np.ones(len(part_costs)), part_costs.mean(1)
        np.maximum.at(lower_bounds, self.part_of[: self.num_sequences] // self.shape[1], self.min_ratios)
        ratios = np.where(means > 0, part_costs.max(1), 1.0) / np.where(means > 0, means, 1.0)
        return ratios / lower_bounds, lower_bounds

    def _apply_best_swap(self, step: int, part_costs: np.ndarray, others: Sequence[int]) -> set[int]:
        """Make the best swap between `step` and `others`; the steps that changed, empty if no swap helps."""
        ranks = self.shape[1]
        a = np.flatnonzero(self.part_of // ranks == step)
        b = np.flatnonzero(np.isin(self.part_of // ranks, others))
        p, q = self.part_of[a][:, None], self.part_of[b][None]
        allowed = p != q
        for size, limit in ((self.lengths, self.limits.tokens), (self.counts, self.limits.sequences)):
            totals, moved = np.bincount(self.part_of, size), size[a][:, None] - size[b][None]
            allowed &= (totals[p] - moved <= limit) & (totals[q] + moved <= limit)
        moved, same_step, j = self.costs[a][:, None] - self.costs[b][None], q // ranks == step, q // ranks
        weights, means, flat = self.ratios(part_costs)[1] ** -_POWER, part_costs.mean(1), part_costs.ravel()
        sums = (part_costs**_POWER).sum(1) * weights
        p_change = ((flat[p] - moved) ** _POWER - flat[p] ** _POWER) * weights[step]
        q_change = ((flat[q] + moved) ** _POWER - flat[q] ** _POWER) * weights[j]
        before = _imbalance(sums, means)
        same_step_after = _imbalance(sums[step] + p_change + q_change, means[step])
        cross_step_after = _imbalance(sums[step] + p_change, means[step] - moved / ranks)
        cross_step_after += _imbalance(sums[j] + q_change, means[j] + moved / ranks)
        gain = np.where(same_step, before[step] - same_step_after, before[step] + before[j] - cross_step_after)
        gain[~allowed] = -np.inf
        i, k = np.unravel_index(int(gain.argmax()), gain.shape)
        if gain[i, k] <= _TOLERANCE**2:
            return set()
        self.part_of[a[i]], self.part_of[b[k]] = q[0, k], p[i, 0]
        self.part_of[self.num_sequences :] = np.arange(len(flat))
        return {step, int(j[0, k])}

    def _repartition_pair(self, step: int, part_costs: np.ndarray) -> set[int]:
        """Split the sequences of the most expensive part and another one optimally, if they are few."""
        first, sizes = step * self.shape[1], np.stack([self.costs, self.lengths, self.counts])
        expensive = first + int(part_costs[step].argmax())
        candidates: list[tuple[float, np.ndarray, np.ndarray]] = []
        for other in range(first, first + self.shape[1]):
            indices = np.flatnonzero(np.isin(self.part_of[: self.num_sequences], (expensive, other)))
            if other == expensive or len(indices) > _MAX_ENUMERATED:
                continue
            splits = np.arange(2 ** len(indices))[:, None] >> np.arange(len(indices)) & 1
            both = np.stack([sizes[:, indices] @ splits.T, sizes[:, indices] @ (1 - splits.T)])  # (2, 3, splits)
            largest, other_costs = both.max(0), np.delete(part_costs[step], (expensive - first, other - first))
            allowed = (largest[1] <= self.limits.tokens) & (largest[2] <= self.limits.sequences)
            powers = np.where(allowed, (both[:, 0] ** _POWER).sum(0) + (other_costs**_POWER).sum(), np.inf)
            candidates.append((float(powers.min()), indices, np.where(splits[powers.argmin()], other, expensive)))
        if not candidates:
            return set()
        best_power, indices, owners = min(candidates, key=lambda split: split[0])
        if (part_costs[step] ** _POWER).sum() - best_power <= _TOLERANCE**2 * part_costs[step].mean() ** _POWER:
            return set()
        self.part_of[indices] = owners
        return {step}


def _imbalance(sums: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Sum of the `_POWER`-th powers of parts over that power of their mean; infinite for an empty step."""
    empty = means < 1e-9
    return np.where(empty, np.inf, np.abs(sums) / np.where(empty, 1.0, means) ** _POWER)
