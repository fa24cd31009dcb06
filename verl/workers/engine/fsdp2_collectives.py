"""FSDP2's collectives, counted for the out-of-memory rescue, and in shared memory where ranks can share some."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl.workers.engine.oom_rescue import UnitCollectives, copy_to_all_parts
from verl.workers.engine.shared_memory_collectives import SharedMemoryCollectives


class FSDP2Collectives(UnitCollectives):
    """All-gathers and reduce-scatters of one unit. All-reduces between copies of the parameters are FSDP2's own."""

    def __init__(self, unit: Any, shared_memory: SharedMemoryCollectives | None, has_copies: bool):
        super().__init__()
        self.unit, self.shared_memory = unit, shared_memory
        self._parameter, self._all_reduced = _first_parameter(unit), False
        unit.set_custom_all_gather(_AllGather(self))
        unit.set_custom_reduce_scatter(_ReduceScatter(self))
        if has_copies:
            unit.set_all_reduce_hook(self._record_all_reduce)  # called after each

    def start_pass(self) -> None:
        super().start_pass()
        self._all_reduced = False

    def is_gathered(self) -> bool:
        if self._parameter is None:
            return False
        module, name = self._parameter
        return not isinstance(module.get_parameter(name), DTensor)

    def has_reduced(self) -> bool:
        return self._all_reduced

    def set_reduces(self, reduces: bool) -> None:
        self.unit.set_requires_all_reduce(reduces, recurse=False)

    def _record_all_reduce(self, _: Tensor) -> None:
        self._all_reduced = True


class _Collective:
    def __init__(self, collectives: FSDP2Collectives):
        self.collectives = collectives

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        memory = self.collectives.shared_memory
        if memory is not None:
            gather = partial(memory.all_gather, output_tensor, input_tensor)
        else:
            gather = partial(dist.all_gather_into_tensor, output_tensor, input_tensor, group, async_op)
        return self.collectives.run(gather, partial(copy_to_all_parts, output_tensor, input_tensor))


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        assert op == dist.ReduceOp.SUM, op
        memory = self.collectives.shared_memory
        if memory is not None:
            reduce = partial(memory.reduce_scatter, output_tensor, input_tensor)
        else:
            reduce = partial(dist.reduce_scatter_tensor, output_tensor, input_tensor, op, group, async_op)
        return self.collectives.run(reduce, output_tensor.zero_)


def _first_parameter(module: nn.Module) -> tuple[nn.Module, str] | None:
    """The first parameter outside of inner units: its module, and its name there."""
    for name, _ in module.named_parameters(recurse=False):
        return module, name
    children = (child for child in module.children() if not isinstance(child, FSDPModule))
    return next(filter(None, map(_first_parameter, children)), None)
