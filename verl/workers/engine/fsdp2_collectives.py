"""FSDP2's collectives, counted for the deadlock guard, and in shared memory where ranks can share some."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl.workers.engine.shared_memory_collectives import SharedMemoryCollectives

T = TypeVar("T")


class FSDP2Collectives:
    """All-gathers and reduce-scatters of one unit: how many a pass has run, and how many its repetition leaves out.

    All-reduces between copies of the parameters are FSDP2's own.
    """

    def __init__(self, unit: Any, shared_memory: SharedMemoryCollectives | None, has_copies: bool):
        self._num_run = self._num_left_out = 0
        self.unit, self.shared_memory = unit, shared_memory
        self._parameter, self._all_reduced = _first_parameter(unit), False
        self._sharded_over = None if self._parameter is None else _mesh_of(self._parameter)
        unit.set_custom_all_gather(_AllGather(self))
        unit.set_custom_reduce_scatter(_ReduceScatter(self))
        if has_copies:
            unit.set_all_reduce_hook(self._record_all_reduce)  # called after each

    def start_pass(self) -> None:
        """Count from zero; parameters that are gathered already are as good as one all-gather."""
        self._num_run, self._num_left_out = int(self.is_gathered()), 0
        self._all_reduced = False

    def repeat_pass(self) -> None:
        """Leave out in the next pass as many as this one has run."""
        self._num_run, self._num_left_out = 0, self._num_run

    def run(self, collective: Callable[[], T], leave_out: Callable[[], object]) -> T | None:
        """`collective()`, or in its place `leave_out()`."""
        if self._num_left_out:
            self._num_left_out -= 1
            leave_out()
            return None
        result = collective()
        self._num_run += 1
        return result

    def is_gathered(self) -> bool:
        """Whether the parameters are gathered."""
        if self._parameter is None:
            return False
        return _mesh_of(self._parameter) != self._sharded_over

    def has_reduced(self) -> bool:
        """Whether this pass has summed the gradient over the copies, which is not counted."""
        return self._all_reduced

    def set_reduces(self, reduces: bool) -> None:
        """Set whether the next pass sums over the copies."""
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


def copy_to_all_parts(gathered: Tensor, local: Tensor) -> None:
    """(R * S,) <- (S,), R times: finite values in place of an all-gather."""
    for part in gathered.view(-1, len(local)):
        if part.data_ptr() != local.data_ptr():
            part.copy_(local)


def _mesh_of(parameter: tuple[nn.Module, str]) -> DeviceMesh | None:
    """The mesh that a parameter is sharded over now; experts that are gathered still are over one."""
    found = parameter[0].get_parameter(parameter[1])
    return found.device_mesh if isinstance(found, DTensor) else None


def _first_parameter(module: nn.Module) -> tuple[nn.Module, str] | None:
    """The first parameter outside of inner units: its module, and its name there."""
    for name, _ in module.named_parameters(recurse=False):
        return module, name
    children = (child for child in module.children() if not isinstance(child, FSDPModule))
    return next(filter(None, map(_first_parameter, children)), None)
