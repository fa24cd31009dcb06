"""Moves a model between devices without replacing its parameters, and keeps freed host memory in the process."""

import ctypes

import torch
from torch import nn

MMAP_THRESHOLD_BYTES = 32 << 20  # allocations of at least this size get a mapping of their own
TRIM_THRESHOLD_BYTES = 1 << 30  # freed memory that stays with the process
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # values from malloc.h


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """`model.to(device)` that keeps every parameter object, so that ties and optimisers stay valid.

    On devices added by a plug-in, `Module.to` makes new parameters, one per name: tied weights come apart, and an
    optimiser goes on updating the old ones. torch avoids that by swapping the tensors inside the objects.
    """
    parameter = next(model.parameters(), None)
    target = torch.empty(0, device=device)
    if parameter is None or torch._has_compatible_shallow_copy_type(parameter, target):
        return model.to(device)
    previous = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(previous)


def keep_freed_memory() -> None:
    """Make the next step reuse the memory that the last one freed, if the C library is glibc.

    By default glibc returns it to the system, which maps and zeroes it again: a few per cent of a small step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
