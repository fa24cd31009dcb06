"""Out-of-memory recovery: the mini-batch restarts in smaller micro-batches, with the same gradient."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching, sequence_groups, split_micro_batches
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError
from verl.workers.engine.micro_batch_forward import MicroBatch
from verl.workers.engine.rank_mesh import RankMesh

logger = logging.getLogger(__name__)

# Messages of allocators that raise a plain RuntimeError: the CPU's, cuBLAS's for its workspace, vendors' own.
OOM_MESSAGES = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
NO_LIMIT = 2**62  # above any number of tokens


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether `error` is an allocator's out-of-memory error."""
    return isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in OOM_MESSAGES)


@dataclass(frozen=True)
class OOMEvent:
    """A micro-batch that ran out of memory."""

    tokens: int  # that the model computed
    sequences: int
    message: str  # the allocator's; storing the error would keep the tensors of its frames alive

    @classmethod
    def of(cls, error: RuntimeError, micro_batch: MicroBatch) -> "OOMEvent":
        """Raises `error` if it is another error, or the micro-batch is a dummy and cannot be smaller."""
        if micro_batch.is_dummy or not is_out_of_memory(error):
            raise error
        return cls(micro_batch.num_computed, micro_batch.batch.num_sequences, str(error).split("\n")[0])

    @property
    def allowed(self) -> int:
        """The new limit of tokens per micro-batch; 0 if one sequence alone did not fit."""
        return self.tokens // 2 if self.sequences > 1 else 0


@dataclass
class Attempt:
    """One time over the micro-batches of a batch, split as in `micro`."""

    micro: MicroBatching
    alone: bool
    oom: OOMEvent | None = None

    def until_out_of_memory(
        self, micro_batches: Iterable[MicroBatch], repeat_pass: Callable[[], None]
    ) -> Iterator[MicroBatch]:
        """The micro-batches until one does not fit; then dummies in place of it and of those after it, for the other
        ranks' collectives, or nothing if there are no other ranks. `repeat_pass()` is called before the first dummy."""
        for micro_batch in micro_batches:
            if self.oom is None:
                yield micro_batch
                if self.oom is None:
                    continue
                repeat_pass()
            if self.alone:
                return
            yield micro_batch.dummy()

    @contextmanager
    def catch_out_of_memory(self, micro_batch: MicroBatch) -> Iterator[None]:
        """Records an out-of-memory error in place of raising it."""
        try:
            yield
        except RuntimeError as error:
            self.oom = OOMEvent.of(error, micro_batch)


class TokenLimit:
    """The limit of tokens per micro-batch, lowered after each one that did not fit; None before the first.

    All ranks have the same limit: the smallest that any of them needs.
    """

    def __init__(self, rank_mesh: RankMesh, device: torch.device, pass_name: str, memory_options: str = ""):
        self.rank_mesh, self.device, self.pass_name, self.memory_options = rank_mesh, device, pass_name, memory_options
        self.tokens: int | None = None
        self.restarts = 0

    def attempts(self, batch: Batch, micro: MicroBatching, undo: Callable[[], None]) -> Iterator["Attempt"]:
        """Attempts until one fits on every rank; `undo` reverts one that did not fit."""
        while True:
            attempt = Attempt(self.plan_within_limit(batch, micro), alone=self.rank_mesh.world_size == 1)
            yield attempt
            oom = attempt.oom
            allowed = self.rank_mesh.min_over_ranks(NO_LIMIT if oom is None else oom.allowed, self.device)
            if allowed == NO_LIMIT:
                return
            undo()
            get_platform().empty_cache()
            setting = micro.limit_key if allowed >= max(batch.lengths.tolist(), default=0) else ""
            self._lower_limit(allowed, oom, setting)

    def plan_within_limit(self, batch: Batch, micro: MicroBatching) -> MicroBatching:
        """`micro`, or a new plan for this shard if micro-batches of `micro` could exceed the limit.

        A sequence longer than the limit is a micro-batch of its own, and so are the sequences of a kept group.
        All ranks call it: they agree on the number of micro-batches.
        """
        if self.tokens is None or (micro.max_tokens is not None and micro.max_tokens <= self.tokens):
            return micro
        groups = sequence_groups(batch, replace(micro, share_prefixes=False, max_tokens=None))
        plan: list[tuple[int, ...]] = [tuple(group.indices) for group in groups if group.tokens > self.tokens]
        short = sorted(index for group in groups if group.tokens <= self.tokens for index in group.indices)
        smaller = replace(micro, plan=None, max_tokens=self.tokens)
        plan += [
            tuple(short[i] for i in part)
            for part in split_micro_batches(batch.select_columns(("group_ids",)).select(short), smaller)
        ]
        plan += [()] * (self.rank_mesh.max_over_ranks(len(plan), self.device) - len(plan))
        return replace(micro, plan=tuple(plan))

    def add_metrics(self, metrics: Metrics) -> None:
        """Add the limit and the number of restarts, once there is a limit."""
        if self.tokens is not None and self.rank_mesh.rank == 0:
            metrics.min("micro_batch_token_limit", self.tokens)
            metrics.max("out_of_memory_restarts", self.restarts)

    def _lower_limit(self, allowed: int, oom: OOMEvent | None, setting: str) -> None:
        details = "" if oom is None else f": {oom.tokens} tokens did not fit ({oom.message})"
        is_group = self.tokens is not None and allowed >= self.tokens  # above the limit already, and it stays together
        if allowed == 0 or is_group:
            ours = oom is not None and oom.allowed == allowed
            ran_out = "ran out of memory on one pair alone" if is_group else "ran out of memory on one sequence alone"
            raise ConfigError(
                f"{self.pass_name} {ran_out}{details if ours else ' on another rank'}. "
                f"Keep sequences shorter (data.max_prompt_length and max_response_length, or data.max_length), "
                f"{self.memory_options}"
                f"split sequences (ulysses_sequence_parallel_size) or shard parameters over more ranks, or offload"
            )
        self.tokens, self.restarts = allowed, self.restarts + 1
        logger.warning(
            "%s ran out of memory%s; restarting with at most %d tokens per micro-batch from now on%s",
            self.pass_name,
            details or " on another rank",
            allowed,
            setting and f". Setting {setting}={allowed // self.rank_mesh.sequence_size} saves the restart",
        )
