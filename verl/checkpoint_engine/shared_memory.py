"""`checkpoint_engine.backend=naive`: processes of one machine share a buffer; one half is filled while one is read.

Receivers on the device of a trainer's rank read from that rank, the others from the first on their machine. The buffer
is anonymous host memory, or device memory if a sender and all its receivers use one device that can share it (CUDA
IPC). The processes connect to a Unix socket in a folder that only this user can enter; JSON messages give the position
of each tensor. A receiver copies a half before it acknowledges it, as engines may keep the tensors that they load.
"""

import base64
import contextlib
import json
import mmap
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint_engine.base import Bucket, BucketTransport
from verl.checkpoint_engine.buckets import SHARED_MEMORY, assign_offsets, read_bucket, write_bucket
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError, TransportError

CPU_BUCKET_BYTES = 16 << 20  # bytes: fits processor caches and the allocator's free lists; more is not faster
HEADER_BYTES = 8  # bytes of a message's length, little-endian


@dataclass
class BufferHalf:
    """One half of the buffer, and how other processes open it."""

    buffer: Tensor
    descriptor: int = -1  # of host memory
    handle: list[Any] | None = None  # of device memory


@dataclass
class ReceiverConnection:
    """The sender's connection to one receiver."""

    socket: socket.socket
    num_read: int = 0  # buckets it has copied


class SharedMemoryTransport(BucketTransport):
    """A sender (its rank is 0) writes, its receivers read; all on one machine."""

    def __init__(self, bucket_size: int, timeout: float = 300.0):
        super().__init__(bucket_size, timeout)
        self.receivers: list[ReceiverConnection] = []
        self.sender: socket.socket | None = None
        self.halves: dict[int, BufferHalf] = {}
        self.on_device = False

    def prepare(self) -> dict[str, Any]:
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
        return {"device": device_identity(), "machine": machine_identity(root), "root": str(root)}

    @classmethod
    def build_topology(cls, actor_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]) -> Any:
        ranks: dict[tuple[str, str], int] = {}  # the first with this device, and the first of this machine
        for rank, worker in enumerate(metadata[:actor_world_size]):
            ranks.setdefault(("device", worker["device"]), rank)
            ranks.setdefault(("machine", worker["machine"]), rank)
        ranks.pop(("device", ""), None)
        senders = []
        for number, worker in enumerate(metadata[actor_world_size:]):
            of_machine = ranks.get(("machine", worker["machine"]))
            if of_machine is None:
                raise ConfigError(
                    f"rollout worker {number} is on a machine without a rank of the trainer, and "
                    "checkpoint_engine.backend=naive is for processes of one machine; use backend=nccl (gloo on CPUs)"
                )
            senders.append(ranks.get(("device", worker["device"]), of_machine))
        counts = Counter(senders)
        folders = {rank: str(Path(metadata[rank]["root"]) / f"verl-weights-{uuid.uuid4().hex}") for rank in counts}
        numbers = range(actor_world_size)
        trainer = {
            "rank": [0 if rank in counts else -1 for rank in numbers],
            "folder": [folders.get(rank, "") for rank in numbers],
            "receivers": [counts[rank] for rank in numbers],
        }
        rollout = {
            "rank": list(range(1, rollout_world_size + 1)),
            "folder": [folders[rank] for rank in senders],
            "receivers": [counts[rank] for rank in senders],
        }
        return trainer, rollout

    def init_process_group(self, rank: int, folder: str, receivers: int) -> None:
        self.rank = rank
        if rank == 0:
            os.mkdir(folder, 0o700)
            try:
                self._accept_receivers(Path(folder) / "socket", receivers)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        elif rank > 0:
            self._connect_to_sender(Path(folder) / "socket")

    def _accept_receivers(self, path: Path, count: int) -> None:
        devices = {device_identity()}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(count)
            end = time.monotonic() + self.timeout
            while len(self.receivers) < count:
                listener.settimeout(max(end - time.monotonic(), 0.001))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise TransportError(
                        f"{len(self.receivers)} of {count} rollout workers came for the weights within {self.timeout} s"
                    ) from None
                connection.settimeout(self.timeout)
                self.receivers.append(ReceiverConnection(connection))
                devices.add(receive_message(connection)["device"])
        self.on_device = devices != {""} and len(devices) == 1

    def _connect_to_sender(self, path: Path) -> None:
        self.sender = socket.socket(socket.AF_UNIX)
        self.sender.settimeout(self.timeout)
        end = time.monotonic() + self.timeout
        while True:
            try:
                self.sender.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):  # not there yet
                if time.monotonic() > end:
                    raise TransportError(f"the trainer did not offer its weights within {self.timeout} s") from None
                time.sleep(0.001)
        send_message(self.sender, {"device": device_identity()})

    def max_bucket_bytes(self) -> int:
        return super().max_bucket_bytes() if self.on_device else min(super().max_bucket_bytes(), CPU_BUCKET_BYTES)

    def send_buckets(self, buckets: Iterable[Bucket], dtype: torch.dtype | None, version: int) -> Iterator[Bucket]:
        already_read, number = (self.receivers[0].num_read if self.receivers else 0), 0
        for number, bucket in enumerate(buckets, 1):
            tensor_specs, size = assign_offsets(bucket, dtype)
            self._wait_until_read(already_read + number - 2)  # a receiver may still read this half
            half, is_new = self._buffer_half(number % 2, size)
            sent_bucket = write_bucket(bucket, tensor_specs, half.buffer)
            if self.on_device:
                get_platform().synchronize()
            message = {
                "half": number % 2,
                "tensor_specs": tensor_specs,
                "size": size,
                "new": len(half.buffer) if is_new else 0,
            }
            for receiver in self.receivers:
                send_message(receiver.socket, {**message, "handle": half.handle})
                if is_new and half.handle is None:
                    send_descriptor(receiver.socket, half.descriptor)
            yield sent_bucket
        self._wait_until_read(already_read + number)
        for receiver in self.receivers:
            send_message(receiver.socket, {"end": ""})

    def _wait_until_read(self, count: int) -> None:
        """Wait until every receiver has copied `count` buckets."""
        for number, receiver in enumerate(self.receivers):
            while receiver.num_read < count:
                try:
                    acknowledged = receiver.socket.recv(64)
                except TimeoutError:
                    raise TransportError(
                        f"rollout worker {number} did not take a part of the weights within {self.timeout} s"
                    ) from None
                except OSError:
                    acknowledged = b""
                if not acknowledged:
                    raise TransportError(f"rollout worker {number} disconnected while it was sent weights")
                receiver.num_read += len(acknowledged)

    def _buffer_half(self, number: int, size: int) -> tuple[BufferHalf, bool]:
        """A half of at least `size` bytes, and whether its memory is new to the receivers."""
        current = self.halves.get(number)
        if current is not None and len(current.buffer) >= size:
            return current, False
        if current is not None and current.descriptor >= 0:
            os.close(current.descriptor)
        capacity = max(size, min(self.max_bucket_bytes(), CPU_BUCKET_BYTES))
        self.halves[number] = allocate_device_half(capacity) if self.on_device else allocate_host_half(capacity)
        return self.halves[number], True

    def receive_buckets(self, version: int) -> Iterator[Bucket]:
        assert self.sender is not None, "only rollout workers receive"
        while "end" not in (message := receive_message(self.sender)):
            number = message["half"]
            if message["new"]:
                if message["handle"] is None:
                    _, [descriptor], _, _ = socket.recv_fds(self.sender, 1, 1)
                    self.halves[number] = BufferHalf(map_memory(descriptor, message["new"]))
                    os.close(descriptor)
                else:
                    self.halves[number] = BufferHalf(open_device_memory(message["handle"]))
            copied = self.halves[number].buffer[: message["size"]].clone()
            if message["handle"] is not None:
                get_platform().synchronize()
            send_bytes(self.sender, b".")
            yield read_bucket(message["tensor_specs"], copied)
        if message["end"]:
            raise TransportError(f"the trainer could not send its weights: {message['end']}")

    def fail(self, reason: str) -> None:
        for receiver in self.receivers:
            with contextlib.suppress(OSError, TransportError):
                send_message(receiver.socket, {"end": reason})

    def finalize(self) -> None:
        for connection in [receiver.socket for receiver in self.receivers] + [self.sender]:
            if connection is not None:
                connection.close()
        for half in self.halves.values():
            if half.descriptor >= 0:
                os.close(half.descriptor)
        self.receivers, self.sender, self.halves = [], None, {}


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    send_bytes(connection, len(data).to_bytes(HEADER_BYTES, "little") + data)


def send_bytes(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError as error:
        raise TransportError(f"the other endpoint of the weight transport disconnected ({error})") from error


def send_descriptor(connection: socket.socket, descriptor: int) -> None:
    try:
        socket.send_fds(connection, [b"m"], [descriptor])
    except OSError as error:
        raise TransportError(f"the other endpoint of the weight transport disconnected ({error})") from error


def receive_message(connection: socket.socket) -> dict[str, Any]:
    return json.loads(receive_exactly(connection, int.from_bytes(receive_exactly(connection, HEADER_BYTES), "little")))


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(count - len(parts))
        except TimeoutError:
            raise TransportError(f"no weights came for {connection.gettimeout()} s") from None
        except OSError as error:
            raise TransportError(f"the other endpoint of the weight transport disconnected ({error})") from error
        if not part:
            raise TransportError("the other endpoint of the weight transport disconnected")
        parts += part
    return bytes(parts)


def allocate_host_half(size: int) -> BufferHalf:
    """Anonymous memory that other processes can map; it is freed when all of them have ended."""
    descriptor = os.memfd_create("verl-weights")
    os.posix_fallocate(descriptor, 0, size)  # raises here, instead of a signal at the first write
    return BufferHalf(map_memory(descriptor, size), descriptor)


def map_memory(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def allocate_device_half(size: int) -> BufferHalf:
    """Device memory that other processes of this machine can open."""
    buffer = torch.empty(size, dtype=torch.uint8, device=get_platform().device_name)
    handle = buffer.untyped_storage()._share_cuda_()
    return BufferHalf(buffer, handle=[base64.b64encode(p).decode() if isinstance(p, bytes) else p for p in handle])


def open_device_memory(handle: list[Any]) -> Tensor:
    """The memory of another process's `allocate_device_half`."""
    device = get_platform().current_device()  # the receiver's device index; the sender's may differ
    parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle[1:]]
    storage = torch.UntypedStorage._new_shared_cuda(device, *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def machine_identity(root: Path) -> str:
    """The same in processes that see one folder `root` of one running machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.exists() else socket.gethostname()} {root.stat().st_dev}"


def device_identity() -> str:
    """UUID of this process's device, or "" if its memory cannot be shared with other processes."""
    platform = get_platform()
    if platform.device_name != "cuda" or not platform.is_ipc_supported():
        return ""
    return str(platform.device_module.get_device_properties(platform.current_device()).uuid)
