"""The gradient computed by several ranks, with the model and the mini-batch sharded as in training."""

import dataclasses

import torch
from torch import Tensor

from verl.commands.certify.subject import Subject, build_engine, subjects
from verl.config import FSDPEngineConfig, HFModelConfig, RunConfig, SFTConfig
from verl.data.balance import assign_shards
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup


class RankWorker:
    """One rank; its engine is rebuilt for every variant."""

    def build(self, config: RunConfig | SFTConfig, role: str, model: HFModelConfig, settings: FSDPEngineConfig) -> None:
        """Build the engine of `role` on `model` with `settings`."""
        (subject,) = [subject for subject in subjects(config) if subject.role == role]
        self.subject = dataclasses.replace(subject, model=model, engine=settings)
        self.engine = build_engine(self.subject)

    def gradient(self, shard_and_limits: tuple[Batch, MicroBatching]) -> dict[str, Tensor]:
        """The gradient of the mini-batch by parameter name, on rank 0; empty on the others. Every rank calls it."""
        shard, micro = shard_and_limits
        out = {}
        with self.engine.train_mode():
            self.engine.forward_backward(shard, self.subject.loss, micro, self.subject.temperature)
            for name, gradient in self.engine.weights.full_gradients():
                if self.engine.rank == 0:
                    out[name] = gradient.double().cpu()
            self.engine.weights.zero_grad()
        return out


class RankGradients:
    """The driver's side: builds engines on the ranks and sums their gradients."""

    def __init__(self, config: RunConfig | SFTConfig, size: int):
        self.config, self.size = config, size
        self.group = ProcessGroup(RankWorker, Layout.data_parallel(size))

    def build(self, subject: Subject) -> None:
        """Build an engine for `subject` on every rank; its model may differ from the configured one."""
        self.ulysses_size = subject.engine.ranks_per_sequence
        self.group.broadcast("build", self.config, subject.role, subject.model, subject.engine)

    def gradient(self, mini: Batch, micro: MicroBatching) -> dict[str, Tensor]:
        """The gradient summed over all ranks; ranks of one Ulysses group get the same sequences."""
        if micro.max_tokens is not None:  # the limit of a whole Ulysses group
            micro = dataclasses.replace(micro, max_tokens=micro.max_tokens * self.ulysses_size)
        shards = assign_shards(mini, self.size // self.ulysses_size, micro)
        parts = [(mini.select(torch.tensor(shard.indices)), shard.micro) for shard in shards]
        return self.group.scatter("gradient", [part for part in parts for _ in range(self.ulysses_size)])[0]

    def close(self) -> None:
        self.group.close()
