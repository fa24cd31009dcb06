"""Buckets of weight tensors, and the position of each tensor of a bucket in one byte buffer."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SHARED_MEMORY = Path("/dev/shm")
ALIGNMENT = 64  # bytes; tensors of a buffer start at multiples of it
NamedTensor = tuple[str, Tensor]
TensorSpec = Sequence[Any]  # name, dtype, shape, offset in bytes; sent as JSON


def buckets(
    tensors: Iterable[NamedTensor], max_bytes: int, dtype: torch.dtype | None = None
) -> Iterator[list[NamedTensor]]:
    """Yield tensors in order, floating ones cast to `dtype`, at most `max_bytes` at once (a larger tensor alone)."""
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


def assign_offsets(bucket: Iterable[NamedTensor], dtype: torch.dtype | None = None) -> tuple[list[TensorSpec], int]:
    """Position of each tensor in a buffer, floating ones as `dtype`, and the size of the buffer in bytes."""
    tensor_specs: list[TensorSpec] = []
    size = 0
    for name, tensor in bucket:
        sent_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        tensor_specs.append((name, str(sent_dtype).removeprefix("torch."), list(tensor.shape), size))
        size += tensor.numel() * sent_dtype.itemsize
        size += -size % ALIGNMENT
    return tensor_specs, size


@torch.no_grad()
def write_bucket(
    bucket: Iterable[NamedTensor], tensor_specs: Sequence[TensorSpec], buffer: Tensor
) -> list[NamedTensor]:
    """Copy tensors to their positions in `buffer` (uint8, any device); returns the copies, views of `buffer`."""
    placed = read_bucket(tensor_specs, buffer)
    for (_, source), (_, target) in zip(bucket, placed, strict=True):
        target.copy_(source)
    return placed


def read_bucket(tensor_specs: Iterable[TensorSpec], buffer: Tensor) -> list[NamedTensor]:
    """The tensors in `buffer`, as views of it."""
    tensors = []
    for name, dtype_name, shape, offset in tensor_specs:
        dtype, count = getattr(torch, dtype_name), 1
        for length in shape:
            count *= length
        tensors.append((name, buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)))
    return tensors
