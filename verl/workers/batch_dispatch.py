"""Sends shards of a batch to the data-parallel ranks and gathers columns in the order of the batch."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from verl.data.balance import Shard, assign_shards
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.models.flops import Speed
from verl.runtime.group import WorkerGroup
from verl.workers.engine.prompt_sharing import pays_to_share
from verl.workers.engine_worker import RankBatch

OnSequences = Callable[[int, int], None]  # told how many of so many sequences a pass has done


def ignore(done: int, of: int) -> None:
    """Tells nobody how far a pass is."""


class ShardDispatcher:
    """Calls the `EngineWorker` of every rank as one. A batch's statistics do not depend on how it is sharded.

    If `balanced`, ranks get sequences of equal cost in every micro-step; otherwise equally many, in order.
    A prompt of several sequences is computed once as `share_prompts` says; "auto": where it saves time, which a
    GPU shows by passes for `timed_output`.
    """

    def __init__(
        self,
        group: WorkerGroup,
        balanced: bool = True,
        share_prompts: bool | str = False,
        timed_output: str = "logprobs",
        on_sequences: OnSequences = ignore,
    ):
        self.group, self.balanced, self.share_prompts, self.timed_output = group, balanced, share_prompts, timed_output
        self.shares_prompts = share_prompts is True  # in the last pass
        self.model_facts = model_facts = group.broadcast("model_facts")[0]
        self.has_dropout: bool = model_facts["has_dropout"]
        self.can_cast: bool = model_facts["can_cast"]
        self.attention_length: float = model_facts["attention_length"]
        if share_prompts == "auto" and not model_facts["shares_prompts"]:
            self.share_prompts = False
        self.forward_memory = Metrics()  # perf/*memory*_gb of the last forward pass, maximum over ranks
        self.on_sequences = on_sequences
        self.begin_update(0)

    def forward(
        self,
        batch: Batch,
        names: tuple[str, ...],
        micro: MicroBatching,
        temperature: float,
        dtype: torch.dtype | None = None,
    ) -> dict[str, Tensor]:
        """The outputs `names` as columns (T,), without gradient; computed in `dtype`, if it is given."""
        self._begin_pass(batch.num_sequences)
        shards = self.shards(batch, micro)
        cast = [] if dtype is None else [str(dtype).removeprefix("torch.")]
        results = self.group.scatter("forward", self.rank_batches(batch, shards), names, temperature, *cast)
        self._end_pass(batch.num_sequences)
        self.forward_memory = Metrics()
        for memory, _ in results:
            self.forward_memory.merge(memory)
        return gather_columns(batch, shards, [columns for _, columns in results])

    def update(self, batch: Batch, micro: MicroBatching, temperature: float) -> tuple[Metrics, dict[str, Tensor]]:
        """Run one optimiser step on all ranks; return metrics of the whole batch, and the loss's model outputs (T,)."""
        self._watch_engine()
        shards = self.shards(batch, micro)
        results = self.group.scatter("update", self.rank_batches(batch, shards), temperature)
        self._end_pass(batch.num_sequences)
        self.tokens_per_rank += [batch.lengths[list(shard.indices)].sum() for shard in shards]
        metrics = Metrics()
        for update_metrics, _ in results:
            metrics.merge(update_metrics)
        return metrics, gather_columns(batch, shards, [outputs for _, outputs in results])

    def save(self, folder: Path) -> None:
        """Write the contents listed in the role's `checkpoint.save_contents`."""
        self.group.broadcast("save", folder)

    def finish_save(self, wait: bool = True) -> bool:
        """True once no background save (`checkpoint.async_save`) is running; raises the error of a failed one."""
        return all(self.group.broadcast("finish_save", wait))

    def load(self, folder: Path) -> None:
        """Restore the contents listed in the role's `checkpoint.load_contents`."""
        self.group.broadcast("load", folder)

    def speed(self) -> Speed | None:
        """FLOP counts of the model, and peak FLOPs of all its ranks; None if any rank has no counts."""
        speeds: list[Speed | None] = self.group.broadcast("speed")
        known = [speed for speed in speeds if speed is not None]
        if len(known) < len(speeds):
            return None
        return Speed(known[0].counts, sum(speed.peak_flops for speed in known))

    def begin_update(self, num_sequences: int) -> None:
        """The optimiser steps of a training step begin, with so many sequences in all."""
        self.tokens_per_rank = np.zeros(self.group.layout.dp)  # that each rank has received since
        self._begin_pass(num_sequences)

    def _begin_pass(self, num_sequences: int) -> None:
        self._sequences_done, self._sequences = 0, num_sequences
        self.on_sequences(0, num_sequences)
        self._watch_engine()

    def _end_pass(self, num_sequences: int) -> None:
        self._sequences_done += num_sequences
        self.on_sequences(self._sequences_done, self._sequences)

    def _watch_engine(self) -> None:
        """Count the sequences inside a call by an engine in this process, as if all ranks were as far."""
        if self.group.local_worker is not None:
            done, of, ranks = self._sequences_done, self._sequences, self.group.layout.dp
            told = lambda inside: self.on_sequences(min(done + inside * ranks, of), of)  # noqa: E731
            self.group.local_worker.engine.on_sequences = told

    def shards(self, batch: Batch, micro: MicroBatching) -> list[Shard]:
        self.shares_prompts = self.share_prompts is True
        if self.share_prompts == "auto":
            inputs, sharing = batch.select_columns(()), replace(micro, share_prefixes=True)
            shared = lambda: self.rank_batches(inputs, self._assign(inputs, sharing))  # noqa: E731
            self.shares_prompts = pays_to_share(self.group, self.model_facts, inputs, shared, self.timed_output)
        return self._assign(batch, replace(micro, share_prefixes=self.shares_prompts))

    def _assign(self, batch: Batch, micro: MicroBatching) -> list[Shard]:
        return assign_shards(batch, self.group.layout.dp, micro, self.attention_length, self.balanced)

    def rank_batches(self, batch: Batch, shards: Sequence[Shard]) -> list[RankBatch]:
        """Every rank's sequences, and how it splits them into micro-batches."""
        if len(shards) == 1:
            return [(batch, shards[0].micro)]
        return [(batch.select(shard.indices), shard.micro) for shard in shards]


def gather_columns(batch: Batch, shards: Sequence[Shard], parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Columns (T, ...) of the batch, assembled from the columns of its shards."""
    if len(parts) == 1:
        return parts[0]
    out = {name: torch.zeros(batch.num_tokens, *c.shape[1:], dtype=c.dtype) for name, c in parts[0].items()}
    sequence_ids = batch.sequence_ids()
    for shard, columns in zip(shards, parts, strict=True):
        tokens = torch.isin(sequence_ids, torch.tensor(shard.indices, dtype=sequence_ids.dtype))
        for name, column in columns.items():
            out[name][tokens] = column
    return out
