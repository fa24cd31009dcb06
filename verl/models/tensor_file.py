"""Safetensors files written tensor by tensor: hashed while writing, flushed to disk, one tensor in memory at a time."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BLOCK_BYTES = 1 << 24
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class TensorFile:
    """Writes a safetensors file of `tensors` (meta tensors suffice), which are then added in that order."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]):
        self.path, self.pending = path, {name: (t.dtype, t.shape) for name, t in tensors.items()}
        self._hash = hashlib.sha256()
        self._file = open(path, "wb")  # noqa: SIM115 (closed by __exit__)
        self._write(_header(self.pending))

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor; it must be the next one announced."""
        expected = next(iter(self.pending), None)
        assert expected == name and self.pending.pop(name) == (tensor.dtype, tensor.shape), (
            f"{self.path}: {expected} was announced, {name} {tensor.dtype} {tuple(tensor.shape)} came"
        )
        self._write(raw_bytes(tensor))

    def _write(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        self._file.write(data)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        self._file.close()

    def close(self) -> None:
        """Flush the file to disk; all announced tensors must have been added."""
        assert not self.pending, f"{self.path} lacks {next(iter(self.pending))}"
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    @property
    def digest(self) -> str:
        """sha256, in hexadecimal, of the written bytes."""
        return self._hash.hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write `tensors` as one safetensors file; returns its sha256. Device tensors are copied to the host one by one."""
    with TensorFile(path, tensors) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
    return file.digest


def raw_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor as a file stores them."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def tensor_digest(tensor: Tensor) -> str:
    """sha256 over type, shape and bytes."""
    sha256 = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    sha256.update(raw_bytes(tensor))
    return sha256.hexdigest()


def digests_in(path: Path) -> dict[str, str]:
    """`tensor_digest` of every tensor in a safetensors file, read block by block."""
    out: dict[str, str] = {}
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                sha256 = hashlib.sha256(f"{DTYPES[entry['dtype']]} {tuple(entry['shape'])}".encode())
                start, remaining = entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0]
                file.seek(8 + length + start)
                while remaining and (data := file.read(min(remaining, BLOCK_BYTES))):
                    sha256.update(data)
                    remaining -= len(data)
                out[name] = sha256.hexdigest()
    return out


def file_digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _header(tensors: Mapping[str, tuple[torch.dtype, torch.Size]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
