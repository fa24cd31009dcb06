"""A short fingerprint of a tensor: shape, type and two checksums of its bytes, computed where the tensor lies."""

import torch
from torch import Tensor

_CHUNK = 1 << 16  # 64-bit words at a time: stays in the processor's cache


def fingerprint(tensor: Tensor) -> str:
    """`dtype[shape]:sum:weighted`. Equal bytes in equal order give equal text, on any device.

    The plain sum catches changed values, the position-weighted sum catches moved ones (a transposed or shifted part).
    Not cryptographic: it detects mistakes, not forgery.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8))
    if padded.data_ptr() % 8:
        padded = padded.clone()
    words = padded.view(torch.int64)
    places = position_weights(words.device)
    plain, weighted = torch.zeros(2, dtype=torch.int64, device=words.device).unbind()
    for number, chunk in enumerate(words.split(_CHUNK)):
        plain = plain + chunk.sum()
        weighted = weighted + (chunk * places[: len(chunk)]).sum() * (2 * number + 1)
    kind = str(tensor.dtype).removeprefix("torch.")
    shape = ",".join(map(str, tensor.shape))
    return f"{kind}[{shape}]:{int(plain) & (2**64 - 1):016x}:{int(weighted) & (2**64 - 1):016x}"


def position_weights(device: torch.device) -> Tensor:
    """Odd numbers without a pattern, one per place of a chunk; sums wrap around at 2**64."""
    places = torch.arange(_CHUNK, dtype=torch.int64, device=device)
    return (places * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1
