"""Whether a role computes a prompt of several sequences once: as it was asked, or where that saves time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching, split_micro_batches
from verl.data.shared_prompts import repeated_prompt_lengths
from verl.models.fastest import kept_choice, pick
from verl.runtime.group import WorkerGroup

WAYS = ("each", "once")  # the prompt is computed for each answer, or once; the plain way first
LEAST_SAVED = 1 / 16  # share of a batch's tokens; below, merging two attentions costs what it saves

RankBatches = Sequence[tuple[Batch, MicroBatching]]  # the sequences of each rank, and how it splits them


def pays_to_share(
    group: WorkerGroup, facts: Mapping[str, Any], batch: Batch, shared: Callable[[], RankBatches], output: str
) -> bool:
    """Whether the ranks of `group`, with the `model_facts` that they have, compute `output` faster with shared prompts.

    On a GPU it is measured, once for a model, a size and a machine, over the first micro-batches of `shared()`.
    """
    saved = sum(repeated_prompt_lengths(batch)) / max(batch.num_tokens, 1)
    if saved < LEAST_SAVED or facts["device"] == "cpu":
        return saved >= LEAST_SAVED

    def choose() -> tuple[str, bool]:
        rank_batches = shared()
        parts = [shard.select(split_micro_batches(shard, micro)[0]) for shard, micro in rank_batches]
        limits = replace(rank_batches[0][1], plan=None)
        seconds = {}
        for way in WAYS:
            given = [(part, replace(limits, share_prefixes=way == "once")) for part in parts]
            seconds[way] = max(group.scatter("seconds_of_forward", given, output))
        return pick(seconds), True

    size = f"{batch.num_tokens.bit_length()} bits of tokens, {saved:.1f} of them repeated"
    key = f"prompt of a group, {output}, {facts['cost']} on {facts['device']}, {size}"
    return kept_choice(key, WAYS, choose) == "once"
