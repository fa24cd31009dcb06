"""Ways to split, pack and compute one mini-batch, which must all give the same gradient."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import torch

from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching

WHOLE_MINI_BATCH = "whole mini-batch"


@dataclass(frozen=True)
class Variant:
    """One way to compute the gradient. `engine` and `model` are configuration keys with other values."""

    dimension: str
    setting: str
    micro: MicroBatching = field(default_factory=MicroBatching)
    order: tuple[int, ...] | None = None  # sequences in another order
    shards: int = 1  # data-parallel ranks, simulated one after the other; gradients are summed
    calls: int = 1  # forward_backward calls on parts of the mini-batch; gradients are summed
    engine: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)

    on_ranks: bool = False  # in several processes, with the model and the mini-batch sharded

    @property
    def engine_key(self) -> tuple:
        """Variants with the same `engine_key` can share an engine."""
        return self.on_ranks, tuple(sorted(self.engine.items())), tuple(sorted(self.model.items()))


def local_variants(
    batch: Batch, value_head: bool, configured: MicroBatching, generator: torch.Generator
) -> list[Variant]:
    """The variants that need one process; the first is the whole mini-batch in one micro-batch."""
    n, longest = batch.num_sequences, int(batch.lengths.max())
    by_size = [MicroBatching(max_sequences=k) for k in (1, 2, max(3, n // 2 + 1))]
    by_size += [MicroBatching(max_tokens=k) for k in (longest, 2 * longest + 1)]
    sizes = [Variant("micro-batch size", describe(micro), micro) for micro in by_size]
    sizes.append(Variant("micro-batch size", f"this configuration: {describe(configured)}", configured))
    shuffled = tuple(torch.randperm(n, generator=generator).tolist())
    longest_first = tuple(torch.argsort(batch.lengths, descending=True, stable=True).tolist())
    budget = MicroBatching(max_tokens=2 * longest)
    orders = [
        Variant("packing order", "reversed, 3 sequences", MicroBatching(max_sequences=3), tuple(reversed(range(n)))),
        Variant("packing order", "shuffled, 3 sequences", MicroBatching(max_sequences=3), shuffled),
        Variant("packing order", f"longest first, {describe(budget)}", budget, longest_first),
    ]
    accumulated = [Variant("accumulation", f"{k} calls", MicroBatching(max_sequences=2), calls=k) for k in (2, 3)]
    data_parallel = [
        Variant("data parallel", f"{k} ranks", MicroBatching(max_sequences=2), shards=k) for k in (2, 3, n)
    ]
    modes = ("eager", "chunked", "fused")
    heads = []
    if not value_head:
        plain, switches = {"use_fused_kernels": False}, ("entropy_checkpointing", "entropy_from_logits_with_chunking")
        off = dict.fromkeys(switches, False)  # the other variants use the configured values
        heads = [Variant("head mode", mode, budget, engine={**off, "head_mode": mode}, model=plain) for mode in modes]
        chunks = {**off, switches[1]: True, "entropy_from_logits_chunk_size": 5, "head_mode": "auto"}
        heads.append(Variant("head mode", "chunks of 5 tokens", budget, engine=chunks, model=plain))
    layout = [
        Variant("gradient checkpointing", "on", budget, model={"enable_gradient_checkpointing": True}),
        Variant("gradient checkpointing", "off", budget, model={"enable_gradient_checkpointing": False}),
        Variant("activation offload", "on", budget, model={"enable_activation_offload": True}),
        Variant("padding", "packed", budget, model={"use_remove_padding": True}),
        Variant("padding", "padded", budget, model={"use_remove_padding": False}),
    ]
    whole = Variant(WHOLE_MINI_BATCH, "one micro-batch")
    return [whole, *sizes, *orders, *accumulated, *data_parallel, *heads, *layout]


def prefix_sharing_variants(batch: Batch) -> list[Variant]:
    """Variants that compute a prompt once for all sequences that begin with it."""
    longest = int(batch.lengths.max())
    limits = (MicroBatching(), MicroBatching(max_tokens=2 * longest), MicroBatching(max_sequences=3))
    return [Variant("prefix sharing", describe(m), dataclasses.replace(m, share_prefixes=True)) for m in limits]


def rank_variants(batch: Batch, ranks: int, ulysses_size: int, experts: int) -> list[Variant]:
    """Variants with the model sharded over `ranks` processes: data parallel, Ulysses groups of `ulysses_size`, and its
    `experts` divided over all of them."""
    budget = MicroBatching(max_tokens=2 * int(batch.lengths.max()))
    no_reshard = {"reshard_after_forward": False}
    out = [
        Variant("sharded", f"{ranks} ranks, {describe(budget)}", budget, on_ranks=True),
        Variant("sharded", f"{ranks} ranks, 1 sequence", MicroBatching(max_sequences=1), on_ranks=True),
        Variant("sharded", f"{ranks} ranks, gathered once", budget, engine=no_reshard, on_ranks=True),
    ]
    ulysses = {"ulysses_sequence_parallel_size": ulysses_size}
    if ulysses_size > 1:
        out.append(Variant("Ulysses", f"{ulysses_size} of {ranks} ranks", budget, engine=ulysses, on_ranks=True))
    if experts and experts % ranks == 0:
        divided = {"expert_parallel_size": ranks}
        out.append(Variant("experts", f"divided over {ranks} ranks", budget, engine=divided, on_ranks=True))
    return out


def describe(micro: MicroBatching) -> str:
    """A micro-batch limit in words."""
    tokens = [] if micro.max_tokens is None else [f"{micro.max_tokens} tokens"]
    sequences = [] if micro.max_sequences is None else [f"{micro.max_sequences} sequences"]
    return ", ".join(tokens + sequences) or "no limit"
