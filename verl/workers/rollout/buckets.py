"""Weights on their way to an engine that keeps its own copy: buckets of tensors, and files in shared memory."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")


def buckets(
    tensors: Iterable[tuple[str, Tensor]], max_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, Tensor]]]:
    """Tensors in their order, floating ones cast to `dtype`, at most `max_bytes` at once (a larger tensor alone)."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        tensor = tensor.detach()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder in memory, open to this user only; gone afterwards."""
    root = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="verl-weights-", dir=root) as folder:
        yield Path(folder)


@contextlib.contextmanager
def shared_file(bucket: list[tuple[str, Tensor]]) -> Iterator[Path]:
    """The bucket as a safetensors file in memory; gone afterwards."""
    with shared_folder() as folder:
        path = folder / "bucket.safetensors"
        save_file({name: tensor.contiguous().cpu() for name, tensor in bucket}, path)
        yield path
