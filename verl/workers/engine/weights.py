"""What every way of holding a model's parameters offers to the engine."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn

from verl.workers.engine.optimizer import clip_gradients, first_non_finite, gradient_norm

T = TypeVar("T")


class Weights:
    """The parameters of one model: whole on one rank, or in shards over many."""

    named: list[tuple[str, nn.Parameter]]  # what the optimiser trains, by the model's names; tied ones once
    gradient_scale = 1.0  # what a loss is multiplied by so that gradients come out summed over the ranks

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for _, p in self.named if p.requires_grad]

    def run(self, function: Callable[[], T]) -> T:
        """`function()` while the parameters outside the layers are whole; layers become whole as they are called."""
        return function()

    def synchronize(self, last: bool) -> None:
        """Whether the next backward pass is the `last` before an optimiser step, the one that sums over the ranks."""

    def rest(self) -> None:
        """Let go of everything that was gathered to run forward."""

    def publish(self) -> None:
        """Let the model compute with the trained values."""

    def to(self, device: torch.device) -> None:
        """Move model and trained parameters; every parameter stays the same object."""
        raise NotImplementedError

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every trained parameter, one at a time. A collective where there are shards."""
        for name, parameter in self.named:
            yield name, parameter.detach()

    def gradient_norm(self) -> float:
        """2-norm of the whole gradient, the same number on every rank."""
        return gradient_norm(self.trainable)

    def clip_gradients(self, norm: float, max_norm: float | None) -> None:
        """Scale a gradient of `norm` down to `max_norm`; None or 0 never clips."""
        clip_gradients(self.trainable, norm, max_norm)

    def first_non_finite(self) -> str:
        """The first parameter, in the model's order, whose gradient holds a NaN or an infinity."""
        return first_non_finite(self.named)
