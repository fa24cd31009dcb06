"""A copy of the trained weights in host memory, by which a model can compute while it is trained on."""

import torch
from torch import Tensor

from verl.workers.engine.model_parameters import ModelParameters


class KeptWeights:
    """This rank's shards of the trained parameters, as they were. Frozen parameters need no copy."""

    def __init__(self, weights: ModelParameters, device: torch.device):
        self.weights = weights
        pinned = device.type != "cpu"
        self._copies = [torch.empty_like(p, device="cpu", pin_memory=pinned) for p in weights.local_trainable()]

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    @torch.no_grad()
    def keep(self) -> None:
        """Take over the values of now."""
        for copy, parameter in self._pairs():
            copy.copy_(parameter)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the values, one tensor at a time; twice is nothing, bit for bit."""
        for copy, parameter in self._pairs():
            now = parameter.clone()
            parameter.copy_(copy)
            copy.copy_(now)
        self.weights.copy_to_model()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self._copies, self.weights.local_trainable(), strict=True))
