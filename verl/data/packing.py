"""Micro-batches: which sequences go through the model together."""

from dataclasses import dataclass

from verl.data.batch import Batch
from verl.utils.errors import ConfigError


@dataclass(frozen=True)
class MicroBatching:
    """How a shard is cut into forwards: by a token budget, or by a fixed number of sequences. None means no limit."""

    max_tokens: int | None = None
    max_sequences: int | None = None


def split_micro_batches(batch: Batch, micro: MicroBatching) -> list[list[int]]:
    """Index lists that cover every sequence once; each list is one forward.

    With `max_tokens`, longest-first into the emptiest of the fewest bins that hold the total, one bin more at a time
    until none is over the budget. A sequence longer than the budget is refused: it is never split.
    """
    lengths = batch.lengths.tolist()
    if micro.max_tokens is not None:
        return pack_by_tokens(lengths, micro.max_tokens)
    size = micro.max_sequences or max(len(lengths), 1)
    return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]


def pack_by_tokens(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Groups of indices whose lengths add up to at most `max_tokens`, balanced, each group in ascending order."""
    longest = max(lengths, default=0)
    if longest > max_tokens:
        raise ConfigError(
            f"a sequence of {longest} tokens does not fit into a micro-batch of {max_tokens} tokens; raise "
            f"*_max_token_len_per_gpu to at least {longest} or lower data.max_prompt_length/max_response_length"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = max(1, -(-sum(lengths) // max_tokens)) if lengths else 0
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        loads = [0] * count
        for i in order:
            emptiest = min(range(count), key=loads.__getitem__)
            bins[emptiest].append(i)
            loads[emptiest] += lengths[i]
        if all(load <= max_tokens for load in loads):
            return [sorted(group) for group in bins if group]
        count += 1
