"""The per-rank worker of actor, critic and reference, and the split of a batch into mini-batches."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
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
from verl.data.micro_batches import MicroBatching, group_indices
from verl.models.flops import Speed
from verl.models.performance import has_dropout
from verl.observe.memory_metrics import memory_metrics
from verl.observe.profiling.rank_profiler import mini_batch_done
from verl.plugin.platform import get_platform
from verl.runtime.group import RankPlace
from verl.utils.seeds import derive_seed
from verl.workers.engine.base import BaseEngine

RankBatch = tuple[Batch, MicroBatching]  # a rank's sequences, and how it splits them into micro-batches


class EngineWorker:
    """Runs one rank's engine, and the loss it trains with, for the driver."""

    def __init__(self, engine: BaseEngine, loss: TokenLoss | None = None):
        self.engine, self.loss, self.endpoint = engine, loss, TransportEndpoint()
        engine.initialize()

    def place(self) -> RankPlace:
        """This rank's part of the data."""
        return self.engine.place

    def model_facts(self) -> dict[str, Any]:
        """Facts about the model for the driver."""
        speed = self.engine.speed()
        return {
            "has_dropout": has_dropout(self.engine.model),
            "attention_length": self.attention_length(),
            "can_cast": self.engine.can_cast,
            "shares_prompts": self.engine.shares_prompts,
            "device": get_platform().device_name,
            "cost": speed and f"{speed.counts.per_token} FLOPs a token at {speed.peak_flops:.0e} a second",
        }

    def seconds_of_forward(self, rank_batch: RankBatch, output: str) -> float:
        """Seconds of a pass without gradient over the shard: of the faster of two, after one to warm up."""
        seconds = []
        for _ in range(3):
            get_platform().synchronize()
            started = time.perf_counter()
            self.forward(rank_batch, (output,), 1.0)
            get_platform().synchronize()
            seconds.append(time.perf_counter() - started)
        return min(seconds[1:])

    def forward(
        self, rank_batch: RankBatch, outputs: tuple[str, ...], temperature: float, dtype: str | None = None
    ) -> tuple[Metrics, dict[str, Tensor]]:
        """Peak memory, and the `outputs` (T,) of the shard, without gradient; computed in `dtype`, if it is given."""
        shard, micro = rank_batch
        get_platform().reset_peak_memory()
        with self.engine.eval_mode(), self.engine.computing_in(getattr(torch, dtype)) if dtype else nullcontext():
            columns = self.engine.forward(shard, outputs, micro, temperature)
            return add_memory_metrics(Metrics()), columns

    def update(self, rank_batch: RankBatch, temperature: float) -> tuple[Metrics, dict[str, Tensor]]:
        """Run one optimiser step on the shard; return metrics, and the outputs (T,) of its forward pass."""
        shard, micro = rank_batch
        assert self.loss is not None, "a worker without a loss only runs forward"
        get_platform().reset_peak_memory()
        with self.engine.train_mode():
            result = self.engine.forward_backward(shard, self.loss, micro, temperature)
            metrics = add_memory_metrics(result.metrics.merge(self.engine.optim_step()))
        mini_batch_done()
        return metrics, result.outputs

    def speed(self) -> Speed | None:
        """FLOP counts of the model, and the peak FLOP/s; None if the engine counts no FLOPs."""
        return self.engine.speed()

    def attention_length(self) -> float:
        """Sequence length at which attention costs as much as all else; infinite if the engine counts no FLOPs."""
        speed = self.engine.speed()
        return float("inf") if speed is None else speed.counts.attention_length

    def device_memory_used(self) -> int:
        """Bytes that all processes use of this rank's device; 0 where that is not known."""
        return get_platform().device_memory_used()

    def keep_weights(self) -> int:
        """Copy the trained weights of this rank into host memory, over an earlier copy; its size in bytes."""
        return self.engine.keep_weights()

    def swap_weights(self) -> None:
        """Exchange the trained weights with the copy."""
        self.engine.swap_weights()

    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule by one training step."""
        self.engine.lr_scheduler_step()

    def transport_step(self, step: str, argument: Any) -> Any:
        """Run `step` of a weight transfer on this rank's endpoint. "connect" takes the arguments of all ranks; "send",
        a collective, takes the policy version, the dtype and, for adapters alone, whether the base weights go too."""
        if step == "send":
            version, dtype, *adapters = argument
            weights = self.engine.export_adapters(*adapters) if adapters else self.engine.export_weights()
            return self.endpoint.send(weights, version, dtype)
        return getattr(self.endpoint, step)(argument[self.engine.rank] if step == "connect" else argument)

    def save(self, folder: Path) -> None:
        self.engine.save(folder)

    def finish_save(self, wait: bool) -> bool:
        return self.engine.finish_save(wait)

    def load(self, folder: Path) -> None:
        self.engine.load(folder)


class WorkerWithoutAdapters(EngineWorker):
    """Runs forward passes of another worker's engine with its adapters disabled. Needs no second model in memory."""

    def __init__(self, worker: EngineWorker):
        self.engine, self.loss = worker.engine, None

    def forward(self, *args: Any) -> tuple[Metrics, dict[str, Tensor]]:
        with self.engine.disable_adapter():
            return super().forward(*args)


def add_memory_metrics(metrics: Metrics) -> Metrics:
    """`metrics` with perf/*memory*_gb of this process added; merging takes the maximum over ranks and mini-batches."""
    platform = get_platform()
    for name, value in memory_metrics(*platform.peak_memory(), platform.device_memory_used()).items():
        metrics.max(name, value)
    return metrics


def micro_batching(section: Section, keys: tuple[str, str, str], ranks_per_sequence: int = 1) -> MicroBatching:
    """A fixed number of sequences if it is set and the flag for token budgets is off; otherwise a token budget.

    Only the limit that applies is read, so that a run can report that the other one has no effect.
    `ranks_per_sequence` is the number of ranks that split each sequence.
    """
    flag, size, budget = keys
    path = section.__dict__.get(PATH, "*")
    setting = f"{path}.{budget}"
    if section[flag] or section[size] is None:
        return MicroBatching(section[budget] * ranks_per_sequence, limit_key=setting)
    setting = f"{path}.{flag}=True and {setting}"
    return MicroBatching(max_sequences=section[size], limit_key=setting)


class MiniBatches:
    """Splits a training step's batch into mini-batches of `prompts_per_step` whole groups, `epochs` times."""

    def __init__(self, prompts_per_step: int, epochs: int, shuffle: bool, seed: int):
        self.prompts_per_step, self.epochs, self.shuffle, self.seed = prompts_per_step, epochs, shuffle, seed

    def split(self, batch: Batch, step: int) -> Iterator[tuple[Tensor, Batch]]:
        """(indices, mini-batch) in training order. The shuffle is a function of the seed, `step` and the epoch."""
        groups = group_indices(batch["slot_ids"] if "slot_ids" in batch else batch["group_ids"])
        for epoch in range(self.epochs):
            order = list(range(len(groups)))
            if self.shuffle:
                generator = torch.Generator().manual_seed(derive_seed(self.seed, "mini-batches", step, epoch))
                order = torch.randperm(len(groups), generator=generator).tolist()
            for start in range(0, len(order), self.prompts_per_step):
                indices = torch.tensor(
                    [index for i in order[start : start + self.prompts_per_step] for index in groups[i]]
                )
                is_whole_batch = len(indices) == batch.num_sequences and not self.shuffle
                yield indices, batch if is_whole_batch else batch.select(indices)


def with_loss_weights(batch: Batch, mode: str, scale_factor: float | None, dtype: torch.dtype = torch.float32) -> Batch:
    """The mini-batch with a column `loss_weights`, computed over the whole mini-batch."""
    return batch.with_columns(loss_weights=loss_weights(batch, mode, scale_factor, dtype))
