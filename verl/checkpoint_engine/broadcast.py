"""`checkpoint_engine.backend=nccl`: a collective broadcast by the platform's own library (NCCL, HCCL; gloo on a CPU).

Rank 0 of the trainer and every rollout worker connect to a TCPStore, on loopback unless
`engine_kwargs.nccl.address` names an address of the trainer's machine. JSON messages in the store give the position of
each tensor in a byte buffer; the broadcast sends the buffer. Neither has any authentication: use a private network.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.checkpoint_engine.base import Bucket, BucketTransport
from verl.checkpoint_engine.buckets import assign_offsets, read_bucket, write_bucket
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError, TransportError

LOOPBACK = "127.0.0.1"
CPU_BUCKET_BYTES = 16 << 20  # bytes


class BroadcastTransport(BucketTransport):
    """Broadcasts in a separate process group of trainer rank 0 and all rollout workers."""

    library: str | None = None  # None: the platform's

    def __init__(self, bucket_size: int, timeout: float = 300.0, address: str = LOOPBACK):
        super().__init__(bucket_size, timeout)
        self.address = address
        self.library = self.library or get_platform().communication_backend_name()
        self.device = "cpu" if self.library == "gloo" else get_platform().device_name
        self.listener: socket.socket | None = None
        self.store: dist.Store | None = None
        self.group: Any = None
        self.buffers: dict[int, Tensor] = {}
        self.works: dict[int, Any] = {}  # pending broadcasts by buffer half; a live one keeps the connections open
        self.num_messages = 0  # messages posted or read since the group was formed
        self.num_deleted = 0  # messages already deleted from the store

    def prepare(self) -> dict[str, Any]:
        """Address and port for rank 0 of the trainer to listen on; the other workers close theirs."""
        with contextlib.suppress(OSError):  # an engine on another machine does not have the trainer's address
            self.listener = socket.create_server((self.address, 0))
        return {"address": self.address, "port": self.listener.getsockname()[1] if self.listener else 0}

    @classmethod
    def build_topology(cls, actor_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]) -> Any:
        address, port = metadata[0]["address"], metadata[0]["port"]
        if not port:
            raise ConfigError(f"engine_kwargs: the trainer's machine does not have the address {address}")
        return cls.topology_by_rank(
            actor_world_size, rollout_world_size, address=address, port=port, size=1 + rollout_world_size
        )

    def init_process_group(self, rank: int, address: str, port: int, size: int) -> None:
        self.rank, listener, self.listener = rank, self.listener, None
        descriptor = None
        if rank == 0:
            assert listener is not None, "prepare() comes first"
            descriptor = listener.detach()
        elif listener is not None:
            listener.close()
        if rank < 0:
            return
        with transport_errors("the workers could not connect"):
            timeout = timedelta(seconds=self.timeout)
            self.store = dist.TCPStore(
                address, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False, master_listen_fd=descriptor
            )
            group_store = dist.PrefixStore("weights", self.store)
            self.group = process_group(str(self.library), group_store, rank, size, timeout, address)

    def max_bucket_bytes(self) -> int:
        return min(super().max_bucket_bytes(), CPU_BUCKET_BYTES) if self.device == "cpu" else super().max_bucket_bytes()

    def send_buckets(self, buckets: Iterable[Bucket], dtype: torch.dtype | None, version: int) -> Iterator[Bucket]:
        assert self.store is not None
        self._delete_old_messages()
        for bucket in buckets:
            half, (tensor_specs, size) = self.num_messages % 2, assign_offsets(bucket, dtype)
            self._wait_for_broadcast(half)
            if half not in self.buffers or len(self.buffers[half]) < size:
                self.buffers[half] = torch.empty(size, dtype=torch.uint8, device=self.device)
            sent_bucket = write_bucket(bucket, tensor_specs, self.buffers[half])
            self._post_message({"tensor_specs": tensor_specs, "size": size})
            self._broadcast(half, self.buffers[half][:size])
            yield sent_bucket
        for half in list(self.works):
            self._wait_for_broadcast(half)
        self._post_message({"end": ""})
        if self.device != "cpu":
            self.buffers.clear()  # the engine needs the memory

    def _post_message(self, message: dict[str, Any]) -> None:
        assert self.store is not None
        with transport_errors("the store of the weights' transport failed"):
            self.store.set(f"bucket {self.num_messages}", json.dumps(message))
        self.num_messages += 1

    def _delete_old_messages(self) -> None:
        """Delete the messages of the previous publish, which has ended on every worker.

        Not earlier: a broadcast that is done here may not have started on a worker that gets it from other workers.
        """
        assert self.store is not None
        with transport_errors("the store of the weights' transport failed"):
            for number in range(self.num_deleted, self.num_messages):
                self.store.delete_key(f"bucket {number}")
        self.num_deleted = self.num_messages

    def _broadcast(self, half: int, buffer: Tensor) -> None:
        """Start to send or receive `buffer`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self.timeout)
        with transport_errors("the broadcast of weights failed"):
            self.works[half] = self.group.broadcast([buffer], options)

    def _wait_for_broadcast(self, half: int) -> None:
        """Wait until the broadcast of this half is done. No local refers to it: a traceback would keep it alive."""
        if half not in self.works:
            return
        end = time.monotonic() + self.timeout
        with transport_errors("the broadcast of weights failed"):
            while self.device != "cpu" and not self.works[half].is_completed():  # wait() only blocks a stream there
                if time.monotonic() > end:
                    raise RuntimeError(f"not done after {self.timeout} s")
                time.sleep(0.0002)
            self.works[half].wait()
        del self.works[half]

    def receive_buckets(self, version: int) -> Iterator[Bucket]:
        assert self.store is not None
        while True:
            with transport_errors("the trainer sent no weights"):
                message = json.loads(self.store.get(f"bucket {self.num_messages}"))
            self.num_messages += 1
            if "end" in message:
                break
            buffer = torch.empty(message["size"], dtype=torch.uint8, device=self.device)
            self._broadcast(0, buffer)
            self._wait_for_broadcast(0)
            yield read_bucket(message["tensor_specs"], buffer)
        if message["end"]:
            raise TransportError(f"the trainer could not send its weights: {message['end']}")

    def fail(self, reason: str) -> None:
        if self.rank == 0 and self.store is not None:
            with contextlib.suppress(TransportError):
                self._post_message({"end": reason})

    def finalize(self) -> None:
        """Abort the group, also in the middle of a transfer, and close the store; `prepare` begins anew."""
        if self.group is not None and hasattr(self.group, "abort"):
            with contextlib.suppress(RuntimeError):
                self.group.abort()
        if self.listener is not None:
            self.listener.close()
        self.works.clear()
        self.group = self.store = self.listener = None
        self.buffers.clear()
        self.num_messages = self.num_deleted = 0


class GlooTransport(BroadcastTransport):
    """Broadcasts through host memory, on any platform."""

    library = "gloo"


def process_group(library: str, store: dist.Store, rank: int, size: int, timeout: timedelta, address: str = "") -> Any:
    """A process group of `library` for tensors on its device, separate from the default group."""
    if library == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        is_loopback = address.startswith("127.")
        device = gloo.create_device(hostname=address) if is_loopback else gloo.create_default_device()
        options._devices = [device]
        return gloo(store, rank, size, options)
    if library == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, size, options)
    plugin = dist.Backend._plugins.get(library.upper())
    if plugin is None:
        raise ConfigError(f"no process groups of {library!r} in this torch; use checkpoint_engine.backend=gloo")
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    settings: Any = dist.distributed_c10d._DistributedBackendOptions()
    settings.store, settings.group_rank, settings.group_size, settings.timeout = store, rank, size, timeout
    settings.group_id, settings.global_ranks_in_group = "weights", list(range(size))
    return plugin.creator_fn(settings, None)


@contextlib.contextmanager
def transport_errors(problem: str) -> Iterator[None]:
    """Raise errors of torch.distributed as TransportError."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise TransportError(
            f"{problem}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
