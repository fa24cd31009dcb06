"""Running out of memory is an event: the mini-batch starts again in smaller micro-batches, with the same gradient."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.packing import MicroBatching, split_micro_batches
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError
from verl.workers.engine.forwards import MicroBatch
from verl.workers.engine.mesh import Ranks

logger = logging.getLogger(__name__)
T = TypeVar("T")

# What allocators say that raise a plain RuntimeError: that of the CPU, cuBLAS for its workspace, vendors' own.
SAYINGS = ("DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED", "out of memory")
FITS = 2**62  # more tokens than anybody has


def ran_out(error: RuntimeError) -> bool:
    """Whether an allocator had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or any(saying in str(error) for saying in SAYINGS)


@dataclass(frozen=True)
class Overflow:
    """A micro-batch that did not fit."""

    tokens: int  # that were computed
    sequences: int
    message: str  # the allocator's; the error itself would keep the tensors of its frames alive

    @classmethod
    def of(cls, error: RuntimeError, part: MicroBatch) -> "Overflow":
        """Raises `error` where it is about something else, or nothing can be done about it."""
        if part.is_dummy or not ran_out(error):
            raise error
        return cls(part.num_computed, part.batch.num_sequences, str(error).split("\n")[0])

    @property
    def allowed(self) -> int:
        """Tokens that a micro-batch may have from now on; 0 when one sequence alone was too much."""
        return self.tokens // 2 if self.sequences > 1 else 0


class TokenLimit:
    """The most tokens that a micro-batch may have, learnt from those that did not fit; None before the first.

    All ranks learn the same limit: the smallest that any of them needs.
    """

    def __init__(self, ranks: Ranks, device: torch.device, what: str, levers: str = ""):
        self.ranks, self.device, self.what, self.levers = ranks, device, what, levers
        self.tokens: int | None = None
        self.restarts = 0

    def fit(
        self,
        batch: Batch,
        micro: MicroBatching,
        attempt: Callable[[MicroBatching], tuple[T, Overflow | None]],
        forget: Callable[[], None],
    ) -> T:
        """What `attempt` made of the first cut of `batch` that fits on every rank; `forget` undoes one that did not."""
        while True:
            result, overflow = attempt(self.within(batch, micro))
            allowed = self.ranks.least(FITS if overflow is None else overflow.allowed, self.device)
            if allowed == FITS:
                return result
            del result
            forget()
            get_platform().empty_cache()
            self._learn(allowed, overflow, micro.setting if allowed >= max(batch.lengths.tolist(), default=0) else "")

    def within(self, batch: Batch, micro: MicroBatching) -> MicroBatching:
        """`micro`, or a plan of its own for this shard where that could ask for more than the limit.

        A sequence longer than the limit is a micro-batch of its own.
        """
        if self.tokens is None or (micro.max_tokens is not None and micro.max_tokens <= self.tokens):
            return micro
        lengths = batch.lengths.tolist()
        plan: list[tuple[int, ...]] = [(row,) for row, length in enumerate(lengths) if length > self.tokens]
        short = [row for row, length in enumerate(lengths) if length <= self.tokens]
        smaller = replace(micro, plan=None, max_tokens=self.tokens)
        plan += [tuple(short[i] for i in part) for part in split_micro_batches(batch.keep(()).select(short), smaller)]
        plan += [()] * (self.ranks.most(len(plan), self.device) - len(plan))
        return replace(micro, plan=tuple(plan))

    def report(self, metrics: Metrics) -> None:
        """The limit and how often a mini-batch had to start again, once there is one."""
        if self.tokens is not None and self.ranks.rank == 0:
            metrics.min("micro_batch_token_limit", self.tokens)
            metrics.max("out_of_memory_restarts", self.restarts)

    def _learn(self, allowed: int, overflow: Overflow | None, setting: str) -> None:
        seen = "" if overflow is None else f": {overflow.tokens} tokens did not fit ({overflow.message})"
        if allowed == 0:
            alone = overflow is not None and overflow.allowed == 0
            raise ConfigError(
                f"{self.what} ran out of memory on one sequence alone{seen if alone else ' on another rank'}. Keep "
                f"sequences shorter (data.max_prompt_length and max_response_length, or data.max_length), {self.levers}"
                f"share sequences (ulysses_sequence_parallel_size) or parameters over more ranks, or offload"
            )
        self.tokens, self.restarts = allowed, self.restarts + 1
        logger.warning(
            "%s ran out of memory%s; starting again with at most %d tokens per micro-batch from now on%s",
            self.what,
            seen or " on another rank",
            allowed,
            setting and f". Setting {setting}={allowed // self.ranks.sequence_size} saves the restart",
        )
