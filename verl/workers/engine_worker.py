"""What actor, critic and reference share: the worker that owns an engine, and how a batch becomes optimiser steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.aggregation import loss_weights
from verl.algorithms.losses import TokenLoss
from verl.checkpoint_engine.endpoint import TransportEndpoint
from verl.config.base import PATH, Section
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.models.flops import Speed
from verl.models.performance import has_dropout
from verl.observe.memory_metrics import memory_metrics
from verl.plugin.platform import get_platform
from verl.utils.seeds import derive_seed
from verl.workers.engine.base import BaseEngine

RankBatch = tuple[Batch, MicroBatching]  # what a rank computes on, and in which micro-batches


class EngineWorker:
    """One rank's engine behind the calls that a driver makes, and the loss it trains with."""

    def __init__(self, engine: BaseEngine, loss: TokenLoss | None = None):
        self.engine, self.loss, self.endpoint = engine, loss, TransportEndpoint()
        engine.initialize()

    def model_facts(self) -> dict[str, Any]:
        """What a driver must know of the model: has_dropout, and its attention_length."""
        return {"has_dropout": has_dropout(self.engine.model), "attention_length": self.attention_length()}

    def forward(
        self, rank_batch: RankBatch, outputs: tuple[str, ...], temperature: float
    ) -> tuple[Metrics, dict[str, Tensor]]:
        """Peak memory, and columns (T,) of the shard, without gradient."""
        shard, micro = rank_batch
        get_platform().reset_peak_memory()
        with self.engine.eval_mode():
            columns = self.engine.forward(shard, outputs, micro, temperature)
            return add_memory_metrics(Metrics()), columns

    def update(self, rank_batch: RankBatch, temperature: float) -> tuple[Metrics, dict[str, Tensor]]:
        """One optimiser step on the shard; metrics, and the outputs (T,) of the forward pass that was trained on."""
        shard, micro = rank_batch
        assert self.loss is not None, "a worker without a loss only runs forward"
        get_platform().reset_peak_memory()
        with self.engine.train_mode():
            result = self.engine.forward_backward(shard, self.loss, micro, temperature)
            return add_memory_metrics(result.metrics.merge(self.engine.optim_step())), result.outputs

    def speed(self) -> Speed | None:
        """What the model costs and this rank can do."""
        return self.engine.speed()

    def attention_length(self) -> float:
        """Tokens of a sequence whose attention costs as much as the rest; infinite where nobody counts."""
        speed = self.engine.speed()
        return float("inf") if speed is None else speed.counts.attention_length

    def advance_schedule(self) -> None:
        """One training step is done: the learning rate moves on."""
        self.engine.lr_scheduler_step()

    def transport_step(self, step: str, argument: Any) -> Any:
        """A step of this rank's endpoint of a weight transport. "connect" takes the arguments of all ranks; "send" the
        version and the dtype, and is a collective."""
        if step == "send":
            return self.endpoint.send(self.engine.export_weights(), *argument)
        return getattr(self.endpoint, step)(argument[self.engine.rank] if step == "connect" else argument)

    def save(self, folder: Path, contents: list[str]) -> None:
        self.engine.save(folder, contents)

    def finish_save(self, wait: bool) -> bool:
        return self.engine.finish_save(wait)

    def load(self, folder: Path, contents: list[str]) -> None:
        self.engine.load(folder, contents)


class WorkerWithoutAdapters(EngineWorker):
    """Forward passes of another worker's engine, as if its adapters were not there. No second model in memory."""

    def __init__(self, worker: EngineWorker):
        self.engine, self.loss = worker.engine, None

    def forward(self, *args: Any) -> tuple[Metrics, dict[str, Tensor]]:
        with self.engine.disable_adapter():
            return super().forward(*args)


def add_memory_metrics(metrics: Metrics) -> Metrics:
    """The same metrics and perf/*memory*_gb of this process: the highest of any rank and mini-batch, once merged."""
    for name, value in memory_metrics(*get_platform().peak_memory()).items():
        metrics.max(name, value)
    return metrics


def micro_batching(
    section: Section, keys: tuple[str, str, str], ranks_per_sequence: int = 1, share_prefixes: bool = False
) -> MicroBatching:
    """A fixed number of sequences where one is set and no token budget asked for, otherwise a token budget.

    Of the two limits only the one that decides is read, so that a run can say that the other does nothing.
    `ranks_per_sequence` are the ranks that hold a micro-batch together.
    """
    flag, size, budget = keys
    path = section.__dict__.get(PATH, "*")
    setting = f"{path}.{budget}"
    if section[flag] or section[size] is None:
        return MicroBatching(section[budget] * ranks_per_sequence, share_prefixes=share_prefixes, limit_key=setting)
    setting = f"{path}.{flag}=True and {setting}"
    return MicroBatching(max_sequences=section[size], share_prefixes=share_prefixes, limit_key=setting)


class MiniBatches:
    """Cuts a step's batch into optimiser steps of `prompts_per_step` whole groups, `epochs` times over."""

    def __init__(self, prompts_per_step: int, epochs: int, shuffle: bool, seed: int):
        self.prompts_per_step, self.epochs, self.shuffle, self.seed = prompts_per_step, epochs, shuffle, seed

    def split(self, batch: Batch, step: int) -> Iterator[tuple[Tensor, Batch]]:
        """(indices, mini-batch) in training order. The shuffle follows from the seed, `step` and the epoch."""
        groups = group_indices(batch["group_ids"])
        for epoch in range(self.epochs):
            order = list(range(len(groups)))
            if self.shuffle:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, "mini-batches", step, epoch))
                order = torch.randperm(len(groups), generator=generator).tolist()
            for start in range(0, len(order), self.prompts_per_step):
                indices = torch.tensor(
                    [index for i in order[start : start + self.prompts_per_step] for index in groups[i]]
                )
                whole = len(indices) == batch.num_sequences and not self.shuffle
                yield indices, batch if whole else batch.select(indices)


def group_indices(group_ids: Tensor) -> list[list[int]]:
    """Sequence indices of each group, groups in order of first appearance."""
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(group_ids.tolist()):
        groups.setdefault(group, []).append(index)
    return list(groups.values())


def with_loss_weights(batch: Batch, mode: str, scale_factor: float | None, dtype: torch.dtype = torch.float32) -> Batch:
    """The mini-batch with `loss_weights`, computed over all of it."""
    return batch.with_columns(loss_weights=loss_weights(batch, mode, scale_factor, dtype))
