"""Micro-batches: the sequences of each forward pass."""

import heapq
from dataclasses import dataclass, field

from torch import Tensor

from verl.data.batch import Batch
from verl.data.shared_prompts import prompt_groups, prompt_lengths
from verl.utils.errors import ConfigError


@dataclass(frozen=True)
class MicroBatching:
    """How a shard is split into micro-batches: by a token budget, a number of sequences, or both. None: no limit.

    A `plan` lists the micro-batches instead, as indices into the shard; balance.py makes it for all ranks together.
    A micro-batch of the plan is empty if only other ranks have sequences for it.
    With `share_prefixes` a prompt that several sequences of a micro-batch begin with is computed and counted once.
    With `keep_groups` sequences with the same `group_ids` stay on one rank and in one micro-batch, as a pair of answers
    must; not together with `share_prefixes`.
    """

    max_tokens: int | None = None
    max_sequences: int | None = None
    plan: tuple[tuple[int, ...], ...] | None = None
    share_prefixes: bool = False
    keep_groups: bool = False
    limit_key: str = field(default="*max_token_len_per_gpu", compare=False)  # config key of a rank's `max_tokens`

    def __post_init__(self) -> None:
        for name, limit in (("max_tokens", self.max_tokens), ("max_sequences", self.max_sequences)):
            if limit is not None and limit < 1:
                raise ConfigError(f"a micro-batch of {name}={limit} is impossible; it must be at least 1, or null")


def split_micro_batches(batch: Batch, micro: MicroBatching) -> list[list[int]]:
    """One index list per micro-batch; together they contain every sequence once.

    With `max_tokens`: longest first, each into the emptiest bin; as few bins as can hold the total, plus one more until
    none is over the budget. A sequence is never split: ConfigError if one is longer than the budget.
    """
    if micro.plan is not None:
        return [list(part) for part in micro.plan]
    if micro.share_prefixes or micro.keep_groups:
        return split_with_groups(batch, micro)
    return split_lengths(batch.lengths.tolist(), micro)


def split_lengths(lengths: list[int], micro: MicroBatching) -> list[list[int]]:
    """`split_micro_batches` for sequences of these lengths, within the limits of `micro`."""
    if micro.max_tokens is not None:
        return bin_by_tokens(lengths, micro.max_tokens, micro.max_sequences)
    size = micro.max_sequences or max(len(lengths), 1)
    return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]


def bin_by_tokens(lengths: list[int], max_tokens: int, max_sequences: int | None = None) -> list[list[int]]:
    """Balanced groups of indices with at most `max_tokens` tokens each; indices ascend within a group.

    `max_sequences` limits the members of a group.
    """
    if not lengths:
        return []
    check_longest(max(lengths), max_tokens)
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    max_members = max_sequences or len(lengths)
    count = max(-(-sum(lengths) // max_tokens), -(-len(lengths) // max_members))
    while True:
        groups = _assign_to_emptiest(order, lengths, count, max_members)
        if all(sum(lengths[i] for i in group) <= max_tokens for group in groups):
            return [sorted(group) for group in groups if group]
        count += 1


def check_longest(longest: int, max_tokens: int, what: str = "a sequence") -> None:
    """ConfigError for a sequence, or what `what` says, that is over the budget."""
    if longest > max_tokens:
        raise ConfigError(
            f"{what} of {longest} tokens does not fit into a micro-batch of {max_tokens} tokens; raise "
            f"*max_token_len_per_gpu to at least {longest}, or keep sequences shorter (data.max_prompt_length, "
            "data.max_response_length, data.max_length)"
        )


def split_with_groups(batch: Batch, micro: MicroBatching) -> list[list[int]]:
    """`split_micro_batches` with `keep_groups`, or with `share_prefixes`.

    Kept groups are never split. Sequences that share a prompt are together where the limits allow it, and the prompt
    counts once in each part.
    """
    max_tokens, max_members = micro.max_tokens, micro.max_sequences or max(batch.num_sequences, 1)
    if max_tokens is None and micro.share_prefixes:
        order = [i for group in prompt_groups(batch) for i in group]
        return [order[start : start + max_members] for start in range(0, len(order), max_members)]
    groups = sequence_groups(batch, micro)
    costs = [group.tokens for group in groups]
    max_tokens = max_tokens or max(sum(costs), 1)
    max_members = max([max_members, *(len(group.indices) for group in groups)])
    order, count = sorted(range(len(groups)), key=lambda group: (-costs[group], group)), -(-sum(costs) // max_tokens)
    while True:
        bins = _assign_to_emptiest(order, costs, count, len(groups))
        parts = [sorted(i for group in part for i in groups[group].indices) for part in bins if part]
        within_budget = all(sum(costs[group] for group in part) <= max_tokens for part in bins)
        if within_budget and all(len(part) <= max_members for part in parts):
            return parts
        count += 1


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences that belong in one micro-batch: they begin with the same prompt, or are a pair."""

    indices: list[int]
    tokens: int  # tokens to compute; a shared prompt is counted once
    pairs: int  # pairs of tokens with computed attention, counted without the causal mask


def sequence_groups(batch: Batch, micro: MicroBatching) -> list[SequenceGroup]:
    """The groups of `batch` that `micro` keeps together; every sequence alone if it keeps none."""
    if micro.share_prefixes:
        return prefix_groups(batch, micro.max_tokens, micro.max_sequences)
    lengths = batch.lengths.tolist()
    members = group_indices(batch["group_ids"]) if micro.keep_groups else [[index] for index in range(len(lengths))]
    groups = [SequenceGroup(m, sum(lengths[i] for i in m), sum(lengths[i] ** 2 for i in m)) for m in members]
    if micro.max_tokens is not None and groups:
        longest = max(groups, key=lambda group: group.tokens)
        what = "a sequence" if len(longest.indices) == 1 else f"a group of {len(longest.indices)} sequences"
        check_longest(longest.tokens, micro.max_tokens, what)
    return groups


def group_indices(group_ids: Tensor) -> list[list[int]]:
    """Sequence indices of each group, groups in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(index)
    return list(groups.values())


def prefix_groups(batch: Batch, max_tokens: int | None, max_sequences: int | None) -> list[SequenceGroup]:
    """The groups of `batch`; a group over a limit is split into as few parts as possible, each with the prompt."""
    lengths, prompts, groups = batch.lengths.tolist(), prompt_lengths(batch), []
    for group in prompt_groups(batch):
        prompt = prompts[group[0]]
        response_lengths = [lengths[i] - prompt for i in group]
        budget = sum(response_lengths) or 1
        if max_tokens is not None:
            check_longest(prompt + max(response_lengths), max_tokens)
            budget = max(max_tokens - prompt, 1)
        for part in bin_by_tokens(response_lengths, budget, max_sequences):
            indices, parts = [group[i] for i in part], [response_lengths[i] for i in part]
            pairs = prompt**2 + sum(2 * prompt * length + length**2 for length in parts)
            groups.append(SequenceGroup(indices, prompt + sum(parts), pairs))
    return groups


def _assign_to_emptiest(order: list[int], lengths: list[int], count: int, max_members: int) -> list[list[int]]:
    """`count` groups: each index of `order`, in turn, goes to the group with the fewest tokens that has room."""
    groups: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]  # a heap of (tokens, group); full groups are removed
    for i in order:
        load, number = loads[0]
        groups[number].append(i)
        if len(groups[number]) < max_members:
            heapq.heapreplace(loads, (load + lengths[i], number))
        else:
            heapq.heappop(loads)
    return groups
