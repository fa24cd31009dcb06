"""A process group besides the default one, for transports between separate jobs. Shim: needs torch."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from verl.checkpoint_engine.broadcast import process_group
from verl.plugin.platform import get_platform

_TIMEOUT = timedelta(minutes=10)


class StatelessGroup:
    """Blocking collectives among `world_size` processes, which may be in different torch.distributed jobs."""

    def __init__(self, backend: Any, store: dist.Store, rank: int, world_size: int):
        self.backend, self.store, self.rank, self.world_size = backend, store, rank, world_size

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite `tensor` on all ranks with that of rank `src`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self.backend.broadcast([tensor], options).wait()
        return tensor

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Overwrite `tensor` on all ranks with the reduction over all ranks."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.backend.allreduce([tensor], options).wait()
        return tensor

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        """Send `tensor` to rank `dst`, which calls `recv`."""
        self.backend.send([tensor], dst, 0).wait()

    def recv(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `tensor` with the tensor that rank `src` sends."""
        self.backend.recv([tensor], src, 0).wait()
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.backend.barrier().wait()


def stateless_init_process_group(
    master_address: str, master_port: int, rank: int, world_size: int, device: Any = "cpu"
) -> StatelessGroup:
    """A group of `world_size` ranks that meet at `master_address:master_port`, where rank 0 listens.

    Tensors must lie on `device`: gloo for the CPU, the platform's own library for its device.
    """
    store = dist.TCPStore(master_address, master_port, world_size, is_master=rank == 0, timeout=_TIMEOUT)
    device_type = torch.device(device).type  # a bare number is an index of the platform's device
    library = "gloo" if device_type == "cpu" else get_platform().communication_backend_name()
    prefixed_store = dist.PrefixStore("stateless", store)
    backend = process_group(library, prefixed_store, rank, world_size, _TIMEOUT, master_address)
    return StatelessGroup(backend, store, rank, world_size)
