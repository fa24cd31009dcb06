"""Moving a model between devices without losing who its parameters are."""

import torch
from torch import nn


def move(model: nn.Module, device: torch.device) -> nn.Module:
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
