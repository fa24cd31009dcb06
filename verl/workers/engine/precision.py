"""Parameters trained in one type and computed with in another, without autocast."""

import torch
from torch import Tensor, nn


class MasterWeights:
    """The trained copy of a model's parameters, in the type the optimiser works in.

    Where that is the type the model computes in, there is no copy: `parameters` are the model's own. Otherwise the
    model's parameters are cast; the gradient of every micro-batch is added to the master's in the master's type as soon
    as it is complete, and `publish` rounds the trained values into the model. Buffers keep their type.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype):
        self._computed: list[nn.Parameter] = []
        self._masters: list[nn.Parameter] = []
        self.named: list[tuple[str, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            cast = parameter.is_floating_point() and parameter.dtype != compute_dtype
            self.named.append((name, self._cast(parameter, compute_dtype) if cast else parameter))

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for _, p in self.named if p.requires_grad]

    @property
    def has_copies(self) -> bool:
        return bool(self._masters)

    @torch.no_grad()
    def publish(self) -> None:
        """Round the trained values into the model."""
        if self._masters:
            torch._foreach_copy_([p.data for p in self._computed], [m.data for m in self._masters])

    def to(self, device: torch.device) -> None:
        for master in self._masters:
            master.data = master.data.to(device)

    def _cast(self, parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
        master = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        parameter.data = parameter.data.to(dtype)
        self._computed.append(parameter)
        self._masters.append(master)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_adds_to(master))
        return master


def _adds_to(master: nn.Parameter):
    def hook(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if master.grad is None:
            master.grad = gradient.to(master.dtype)
        else:
            master.grad.add_(gradient)

    return hook
