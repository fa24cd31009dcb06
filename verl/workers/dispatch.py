"""Batches out to the data-parallel ranks and columns back, in the order of the batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl.data.balance import Shard, spread
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.packing import MicroBatching
from verl.runtime.group import WorkerGroup
from verl.workers.training import Work


class Dispatch:
    """An `EngineWorker` per rank, called as one. Statistics of a batch do not depend on how it is spread.

    With `balanced`, ranks get sequences of equal cost in every micro-step; otherwise equally many, in order.
    """

    def __init__(self, group: WorkerGroup, balanced: bool = True):
        self.group, self.balanced = group, balanced
        facts = group.broadcast("facts")[0]
        self.has_dropout: bool = facts["has_dropout"]
        self.attention_length: float = facts["attention_length"]
        self.forward_memory = Metrics()  # perf/*memory*_gb of the last forward pass, the highest of any rank
        self.dealt = np.zeros(group.layout.dp)  # tokens that each rank was given in updates, until somebody empties it

    def forward(
        self, batch: Batch, names: tuple[str, ...], micro: MicroBatching, temperature: float
    ) -> dict[str, Tensor]:
        """Columns (T,) without gradient."""
        shards = self.shards(batch, micro)
        results = self.group.scatter("forward", self.works(batch, shards), names, temperature)
        self.forward_memory = Metrics()
        for memory, _ in results:
            self.forward_memory.merge(memory)
        return gathered(batch, shards, [columns for _, columns in results])

    def update(self, batch: Batch, micro: MicroBatching, temperature: float) -> tuple[Metrics, dict[str, Tensor]]:
        """One optimiser step on all ranks; metrics of the whole batch, and the loss's model outputs (T,)."""
        shards = self.shards(batch, micro)
        results = self.group.scatter("update", self.works(batch, shards), temperature)
        self.dealt += [batch.lengths[list(shard.rows)].sum() for shard in shards]
        metrics = Metrics()
        for learnt, _ in results:
            metrics.merge(learnt)
        return metrics, gathered(batch, shards, [outputs for _, outputs in results])

    def shards(self, batch: Batch, micro: MicroBatching) -> list[Shard]:
        return spread(batch, self.group.layout.dp, micro, self.attention_length, self.balanced)

    def works(self, batch: Batch, shards: Sequence[Shard]) -> list[Work]:
        """Every rank's sequences, and how it cuts them."""
        if len(shards) == 1:
            return [(batch, shards[0].micro)]
        return [(batch.select(shard.rows), shard.micro) for shard in shards]


def gathered(batch: Batch, shards: Sequence[Shard], parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Columns (T,) of the batch from those of its shards."""
    if len(parts) == 1:
        return parts[0]
    out = {name: torch.zeros(batch.num_tokens, dtype=column.dtype) for name, column in parts[0].items()}
    owners = batch.sequence_ids()
    for shard, columns in zip(shards, parts, strict=True):
        tokens = torch.isin(owners, torch.tensor(shard.rows, dtype=owners.dtype))
        for name, column in columns.items():
            out[name][tokens] = column
    return out
