"""Where tensors are: a model moved between devices without losing who its parameters are, and the host's memory."""

import ctypes

import torch
from torch import nn

MMAP_THRESHOLD_BYTES = 32 << 20  # allocations of this size are a mapping of their own
TRIM_THRESHOLD_BYTES = 1 << 30  # of freed memory that stay with the process
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as malloc.h has them


def move_model(model: nn.Module, device: torch.device) -> nn.Module:
    """`model.to(device)`, in which every parameter stays the same object: ties and optimisers keep what they hold.

    On devices that a plug-in brings, `Module.to` makes new parameters, one per name, so tied weights come apart and an
    optimiser goes on training the old ones. Swapping the tensors inside the objects is torch's way around that.
    """
    parameter = next(model.parameters(), None)
    here = torch.empty(0, device=device)
    if parameter is None or torch._has_compatible_shallow_copy_type(parameter, here):
        return model.to(device)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return model.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def keep_freed_memory() -> None:
    """Let the next step use the memory that the last one freed, where the C library is glibc.

    It would go back to the system and be mapped and zeroed anew, page by page, a few per cent of a small step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)
