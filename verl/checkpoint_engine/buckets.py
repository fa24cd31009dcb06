"""Weights on their way: buckets of tensors, and where each tensor of a bucket lies in one run of bytes."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64  # bytes; tensors of a run start at multiples of it
NamedTensor = tuple[str, Tensor]
Entry = Sequence[Any]  # name, dtype, shape, offset in bytes: what JSON carries


def buckets(
    tensors: Iterable[NamedTensor], max_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[NamedTensor]]:
    """Tensors in their order, floating ones cast to `dtype`, at most `max_bytes` at once (a larger tensor alone)."""
    bucket: list[NamedTensor] = []
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


def layout(bucket: Iterable[NamedTensor], dtype: torch.dtype | None = None) -> tuple[list[Entry], int]:
    """Where each tensor goes, floating ones as `dtype`, and the bytes that all take."""
    entries: list[Entry] = []
    size = 0
    for name, tensor in bucket:
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        entries.append((name, str(kind).removeprefix("torch."), list(tensor.shape), size))
        size += tensor.numel() * kind.itemsize
        size += -size % ALIGNMENT
    return entries, size


@torch.no_grad()
def write(bucket: Iterable[NamedTensor], entries: Sequence[Entry], run: Tensor) -> list[NamedTensor]:
    """Copy tensors to their places in `run`, bytes on any device; returns them as they lie there."""
    placed = read(entries, run)
    for (_, source), (_, target) in zip(bucket, placed, strict=True):
        target.copy_(source)
    return placed


def read(entries: Iterable[Entry], run: Tensor) -> list[NamedTensor]:
    """The tensors that lie in `run`; they share its memory."""
    tensors = []
    for name, kind, shape, offset in entries:
        dtype, count = getattr(torch, kind), 1
        for length in shape:
            count *= length
        tensors.append((name, run[offset : offset + count * dtype.itemsize].view(dtype).view(shape)))
    return tensors
