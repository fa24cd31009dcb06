"""A short fingerprint of a tensor: shape, type and a checksum of its bytes, computed on the tensor's device."""

import functools

import torch
from torch import Tensor

_CHUNK_WORDS = 1 << 17  # 64-bit words at a time, which fit into the CPU cache
_MASK = (1 << 64) - 1


def fingerprint(tensor: Tensor) -> str:
    """`dtype[shape]:checksum`. Equal bytes in equal order give equal text, on any device.

    The checksum multiplies every 64-bit word by an odd number for its position: one changed word always changes it, and
    moved words (a transposed or shifted part) do. Not cryptographic: it detects mistakes, not forgery.
    """
    flat = tensor.detach().contiguous().view(-1)
    if tensor.nbytes % 8 or flat.data_ptr() % 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = torch.nn.functional.pad(flat.view(torch.uint8), (0, -tensor.nbytes % 8)).clone()
    words = flat.view(torch.int64)
    weights, chunks = position_weights(words.device), [words]
    if len(words) > _CHUNK_WORDS:
        chunks = [words[start : start + _CHUNK_WORDS] for start in range(0, len(words), _CHUNK_WORDS)]
    if words.is_cpu:
        sums = [int(chunk.dot(weights[: len(chunk)])) for chunk in chunks]
    else:
        sums = torch.stack([(chunk * weights[: len(chunk)]).sum() for chunk in chunks]).tolist()
    total = sum(value * (2 * number + 1) for number, value in enumerate(sums)) & _MASK
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind}[{','.join(map(str, tensor.shape))}]:{total:016x}"


@functools.cache
def position_weights(device: torch.device) -> Tensor:
    """Pseudo-random odd numbers, one per position in a chunk; sums wrap around at 2**64."""
    weights = torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB  # splitmix64
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        weights = (weights ^ ((weights >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return weights | 1
