"""FSDP2's all-gather and reduce-scatter between CPU ranks of one machine, through shared memory.

Gloo sends everything through sockets, which costs several times as much as a copy. Here each rank writes its data into
its own slot, waits at a barrier and reads the other slots. Two sets of slots alternate: the barrier of the other set
guarantees that all ranks have read a set before any rank writes into it again.

Shapes: R ranks, S elements of one rank's shard.
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

FOLDER = Path("/dev/shm")
TOTAL_BYTES = 32 << 20  # of all slots: containers often have 64 MB; larger tensors are sent in chunks


class SharedMemoryCollectives:
    """Two sets of one slot per rank of `group`, in memory that all ranks have mapped."""

    def __init__(self, group: dist.ProcessGroup, memory: Tensor):
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self._slots = memory.view(2, self.size, -1)
        self._slot_set = 0

    @classmethod
    def create(cls, group: dist.ProcessGroup, total_bytes: int = TOTAL_BYTES) -> "SharedMemoryCollectives | None":
        """None if the ranks cannot share memory: on several machines, or with too little of it. A collective."""
        slot = total_bytes // (2 * group.size()) // 64 * 64
        path, memory = [""], None
        if group.rank() == 0:
            try:
                with tempfile.NamedTemporaryFile(prefix="verl-", dir=FOLDER, delete=False) as file:
                    path = [file.name]
                    os.posix_fallocate(file.fileno(), 0, 2 * group.size() * slot)  # fails now if memory is short
            except (OSError, AttributeError):  # no such folder, too little memory, or no posix_fallocate
                _remove(path[0])
                path = [""]
        dist.broadcast_object_list(path, group=group, group_src=0)
        if path[0] and Path(path[0]).is_file():
            memory = torch.from_file(path[0], shared=True, size=2 * group.size() * slot, dtype=torch.uint8)
        all_mapped = torch.tensor(0 if memory is None else 1)
        dist.all_reduce(all_mapped, dist.ReduceOp.MIN, group)
        if group.rank() == 0:
            _remove(path[0])
        return cls(group, memory) if memory is not None and all_mapped else None

    def all_gather(self, full: Tensor, local: Tensor) -> None:
        """(R * S,) <- (S,) of every rank."""
        rows = full.view(self.size, -1)
        for start, stop in self._chunks(local, 1):
            parts = self._exchange(local[None, start:stop])
            for rank in range(self.size):
                if rank != self.rank:
                    rows[rank, start:stop].copy_(parts[rank][0])
        if rows[self.rank].data_ptr() != local.data_ptr():
            rows[self.rank].copy_(local)

    def reduce_scatter(self, local: Tensor, full: Tensor) -> None:
        """(S,) <- sum over ranks of this rank's row of their (R * S,), in rank order on every rank."""
        rows = full.view(self.size, -1)
        for start, stop in self._chunks(local, self.size):
            parts = self._exchange(rows[:, start:stop])
            torch.add(parts[0][self.rank], parts[1][self.rank], out=local[start:stop])
            for part in parts[2:]:
                local[start:stop].add_(part[self.rank])

    def _chunks(self, shard: Tensor, rows: int) -> list[tuple[int, int]]:
        step = self._slots.shape[2] // (rows * shard.element_size())
        return [(start, min(start + step, len(shard))) for start in range(0, len(shard), step)]

    def _exchange(self, rows: Tensor) -> list[Tensor]:
        """The `rows` of every rank, in rank order."""
        slots, self._slot_set = self._slots[self._slot_set], 1 - self._slot_set
        parts = [slot[: rows.nbytes].view(rows.dtype).view(rows.shape) for slot in slots]
        parts[self.rank].copy_(rows)
        dist.barrier(self.group)  # all ranks have written
        return parts


def _remove(path: str) -> None:
    if path:
        Path(path).unlink(missing_ok=True)
