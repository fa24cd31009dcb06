"""A rank that runs out of memory still runs every collective of the pass that other ranks wait for.

FSDP runs an all-gather and a reduction at every layer, on all ranks. The rank whose micro-batch did not fit runs the
pass again with a dummy micro-batch, and leaves out the collectives that it had run: what remains is what its peers wait
for. The results of the pass are wrong on all ranks, and unused: the mini-batch restarts. Ranks that split sequences
stop together, see `ulysses.check_peers`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from verl.models.attention.ulysses import announce_out_of_memory, check_peers, clear_out_of_memory
from verl.plugin.platform import get_platform
from verl.workers.engine.fsdp2_collectives import FSDP2Collectives


class OOMDeadlockGuard:
    """Counts the passes of a sharded model. `reset()` makes it forget a pass that stopped in the middle."""

    def __init__(
        self, units: Sequence[FSDP2Collectives], reset: Callable[[], None], sequence_group: dist.ProcessGroup | None
    ):
        self.units, self.reset, self.sequence_group = units, reset, sequence_group
        self._repeats = False
        self._reduced: list[FSDP2Collectives] = []
        self._notice: dist.Work | None = None

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around the first part of a pass, or all of it without gradients."""
        if not self._repeats:
            for unit in self.units:
                unit.start_pass()
            if self.sequence_group is not None:
                clear_out_of_memory(self.sequence_group)
        yield
        if not torch.is_grad_enabled():
            self._end_pass()

    def backward(self, loss_sum: Tensor) -> None:
        """The backward pass of what the forward pass returned."""
        for unit in self._reduced:
            unit.set_reduces(False)
        loss_sum.backward()
        self._end_pass()

    def repeat_pass(self) -> None:
        """After an out-of-memory error: the next pass, with a dummy micro-batch, leaves out what has run."""
        self._notice = None if self.sequence_group is None else announce_out_of_memory(self.sequence_group)
        self._reduced = [unit for unit in self.units if unit.has_reduced()]
        self.reset()
        get_platform().empty_cache()
        for unit in self.units:
            unit.repeat_pass()
        self._repeats = True

    def _end_pass(self) -> None:
        if self.sequence_group is not None and not self._repeats:
            check_peers(self.sequence_group)
        for unit in self._reduced:
            unit.set_reduces(True)
        if self._reduced:
            self.reset()  # drops what would be added to their next sum: zeros, or NaN where wrong weights overflow
        if self._notice is not None:
            self._notice.wait()
        self._repeats, self._reduced, self._notice = False, [], None
