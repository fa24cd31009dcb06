"""`checkpoint_engine.backend=naive`: processes of one machine share a buffer; one half is filled while one is read.

The buffer is memory without a name or, where all of them use one device that can share it (CUDA IPC), device memory.
They meet at a Unix socket in a folder that only this user can enter; it carries JSON: where each tensor lies. A
receiver copies a half out before it says so: engines may keep what they are given.
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl.checkpoint_engine.base import Piece, PieceTransport
from verl.checkpoint_engine.buckets import SHARED_MEMORY, layout, read, write
from verl.plugin.platform import get_platform
from verl.utils.errors import TransportError

CPU_PIECE = 16 << 20  # bytes: what processor caches and the allocator's free lists still hold; more gains nothing
HEADER = 8  # bytes of a message's length, little-endian


@dataclass
class Half:
    """One half of the buffer: bytes, and how others reach them."""

    run: Tensor
    descriptor: int = -1  # of host memory
    handle: list[Any] | None = None  # of device memory


@dataclass
class Reader:
    """A receiver, as the sender sees it."""

    socket: socket.socket
    has_read: int = 0  # pieces


class SharedMemory(PieceTransport):
    """Rank 0 writes, the others read; all on one machine."""

    def __init__(self, bucket_size: int, timeout: float = 300.0):
        super().__init__(bucket_size, timeout)
        self.readers: list[Reader] = []
        self.sender: socket.socket | None = None
        self.halves: dict[int, Half] = {}
        self.on_device = False

    @classmethod
    def build_topology(cls, actor_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]) -> Any:
        root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        place = tempfile.mkdtemp(prefix="verl-weights-", dir=root)
        return cls.ranked(actor_world_size, rollout_world_size, place=place, readers=rollout_world_size)

    def init_process_group(self, rank: int, place: str, readers: int) -> None:
        self.rank = rank
        if rank == 0:
            try:
                self._await_readers(Path(place) / "socket", readers)
            finally:
                shutil.rmtree(place, ignore_errors=True)
        elif rank > 0:
            self._reach_sender(Path(place) / "socket")

    def _await_readers(self, path: Path, count: int) -> None:
        devices = {device_identity()}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(count)
            end = time.monotonic() + self.timeout
            while len(self.readers) < count:
                listener.settimeout(max(end - time.monotonic(), 0.001))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    raise TransportError(
                        f"{len(self.readers)} of {count} rollout workers came for the weights within {self.timeout} s"
                    ) from None
                connection.settimeout(self.timeout)
                self.readers.append(Reader(connection))
                devices.add(receive(connection)["device"])
        self.on_device = devices != {""} and len(devices) == 1

    def _reach_sender(self, path: Path) -> None:
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
        send(self.sender, {"device": device_identity()})

    def piece_bytes(self) -> int:
        return super().piece_bytes() if self.on_device else min(super().piece_bytes(), CPU_PIECE)

    def send_pieces(self, buckets: Iterable[Piece], dtype: torch.dtype | None, version: int) -> Iterator[Piece]:
        begin, number = (self.readers[0].has_read if self.readers else 0), 0
        for number, bucket in enumerate(buckets, 1):
            entries, size = layout(bucket, dtype)
            self._wait(begin + number - 2)  # for who still reads this half
            half, is_new = self._half(number % 2, size)
            piece = write(bucket, entries, half.run)
            if self.on_device:
                get_platform().synchronize()
            message = {"half": number % 2, "entries": entries, "size": size, "new": len(half.run) if is_new else 0}
            for reader in self.readers:
                send(reader.socket, {**message, "handle": half.handle})
                if is_new and half.handle is None:
                    socket.send_fds(reader.socket, [b"m"], [half.descriptor])
            yield piece
        self._wait(begin + number)
        for reader in self.readers:
            send(reader.socket, {"end": ""})

    def _wait(self, pieces: int) -> None:
        """Until every receiver has copied out so many pieces."""
        for number, reader in enumerate(self.readers):
            while reader.has_read < pieces:
                try:
                    said = reader.socket.recv(64)
                except TimeoutError:
                    raise TransportError(
                        f"rollout worker {number} did not take a part of the weights within {self.timeout} s"
                    ) from None
                except OSError:
                    said = b""
                if not said:
                    raise TransportError(f"rollout worker {number} went away while it was sent weights")
                reader.has_read += len(said)

    def _half(self, number: int, size: int) -> tuple[Half, bool]:
        """Room for `size` bytes; whether it is memory that the receivers do not know."""
        known = self.halves.get(number)
        if known is not None and len(known.run) >= size:
            return known, False
        if known is not None and known.descriptor >= 0:
            os.close(known.descriptor)
        room = max(size, min(self.piece_bytes(), CPU_PIECE))
        self.halves[number] = device_half(room) if self.on_device else host_half(room)
        return self.halves[number], True

    def receive_pieces(self, version: int) -> Iterator[Piece]:
        assert self.sender is not None, "only rollout workers receive"
        while "end" not in (message := receive(self.sender)):
            number = message["half"]
            if message["new"]:
                if message["handle"] is None:
                    _, [descriptor], _, _ = socket.recv_fds(self.sender, 1, 1)
                    self.halves[number] = Half(mapped(descriptor, message["new"]))
                    os.close(descriptor)
                else:
                    self.halves[number] = Half(opened(message["handle"]))
            piece = self.halves[number].run[: message["size"]].clone()
            if message["handle"] is not None:
                get_platform().synchronize()
            deliver(self.sender, b".")
            yield read(message["entries"], piece)
        if message["end"]:
            raise TransportError(f"the trainer could not send its weights: {message['end']}")

    def fail(self, reason: str) -> None:
        for reader in self.readers:
            with contextlib.suppress(OSError, TransportError):
                send(reader.socket, {"end": reason})

    def finalize(self) -> None:
        for connection in [reader.socket for reader in self.readers] + [self.sender]:
            if connection is not None:
                connection.close()
        for half in self.halves.values():
            if half.descriptor >= 0:
                os.close(half.descriptor)
        self.readers, self.sender, self.halves = [], None, {}


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    deliver(connection, len(data).to_bytes(HEADER, "little") + data)


def deliver(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError as error:
        raise TransportError(f"the other end of the weights' transport went away ({error})") from error


def receive(connection: socket.socket) -> dict[str, Any]:
    return json.loads(exactly(connection, int.from_bytes(exactly(connection, HEADER), "little")))


def exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        try:
            part = connection.recv(count - len(parts))
        except TimeoutError:
            raise TransportError(f"no weights came for {connection.gettimeout()} s") from None
        except OSError as error:
            raise TransportError(f"the other end of the weights' transport went away ({error})") from error
        if not part:
            raise TransportError("the other end of the weights' transport went away")
        parts += part
    return bytes(parts)


def host_half(size: int) -> Half:
    """Memory that other processes can map: no name in any folder, nothing left when all have ended."""
    descriptor = os.memfd_create("verl-weights")
    os.posix_fallocate(descriptor, 0, size)  # an error here, not a signal at the first write
    return Half(mapped(descriptor, size), descriptor)


def mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def device_half(size: int) -> Half:
    """Device memory that other processes of this machine can open."""
    run = torch.empty(size, dtype=torch.uint8, device=get_platform().device_name)
    handle = run.untyped_storage()._share_cuda_()
    return Half(run, handle=[base64.b64encode(p).decode() if isinstance(p, bytes) else p for p in handle])


def opened(handle: list[Any]) -> Tensor:
    """What `device_half` made, in another process."""
    device = get_platform().current_device()  # its number here; the sender's may differ
    parts = [base64.b64decode(part) if isinstance(part, str) else part for part in handle[1:]]
    storage = torch.UntypedStorage._new_shared_cuda(device, *parts)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def device_identity() -> str:
    """Names the chip of this process where its memory can be shared with other processes; "" where it cannot."""
    platform = get_platform()
    if platform.device_name != "cuda" or not platform.is_ipc_supported():
        return ""
    return str(platform.device_module.get_device_properties(platform.current_device()).uuid)
