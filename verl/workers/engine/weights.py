"""What every way of holding a model's parameters offers to the engine."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from verl.workers.engine.mesh import Ranks
from verl.workers.engine.optimizer import clip_gradients, first_non_finite, gradient_norm
from verl.workers.engine.shards import Held, held

T = TypeVar("T")


class Weights(ABC):
    """The parameters of one model: whole on one rank, or in shards over many."""

    named: list[tuple[str, nn.Parameter]]  # what the optimiser trains, by the model's names; tied ones once
    ranks = Ranks()
    device = torch.device("cpu")  # of what ranks tell each other
    gradient_scale = 1.0  # what a loss is multiplied by so that gradients come out summed over the ranks

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for _, p in self.named if p.requires_grad]

    def run(self, function: Callable[[], T]) -> T:
        """`function()` while the parameters outside the layers are whole; layers become whole as they are called."""
        return function()

    def backward(self, loss_sum: Tensor) -> None:
        """Add the gradient of the loss that `run` returned to the trained parameters.

        Where an allocator fails in here or in `run`, the gradient is of no use. Over several ranks its error is raised
        once this rank has made every collective, those of the backward pass included, that the others wait for.
        """
        (loss_sum * self.gradient_scale).backward()

    @property
    def has_gradient(self) -> bool:
        """Whether anything has been added to the gradient since the last optimiser step."""
        return any(parameter.grad is not None for parameter in self.trainable)

    def forget_gradient(self) -> None:
        """Drop everything that has been added to the gradient since the last optimiser step."""
        for parameter in self.trainable:
            parameter.grad = None

    def synchronize(self, last: bool) -> None:  # noqa: B027  (one rank has nobody to wait for)
        """Whether the next backward pass is the `last` before an optimiser step, the one that sums over the ranks."""

    def rest(self) -> None:  # noqa: B027  (nor anything gathered)
        """Let go of everything that was gathered to run forward."""

    def publish(self) -> None:  # noqa: B027  (or computes with them already)
        """Let the model compute with the trained values."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move model and trained parameters; every parameter stays the same object."""

    def full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of every trained parameter, one at a time. A collective where there are shards."""
        for name, parameter in self.named:
            yield name, parameter.detach()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole gradient) of every trained parameter that has one, one at a time. A collective too."""
        for name, parameter in self.named:
            if parameter.grad is not None:
                yield name, parameter.grad

    def plain_name(self, name: str) -> str:
        """A tensor's name in the model, without the names of wrappers around its modules."""
        return name

    def structure(self) -> dict[str, Tensor]:
        """Every trained parameter by name, for shapes and types."""
        return dict(self.named)

    def state_of(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
        """What the optimiser remembers of a trained parameter, by name."""
        return optimizer.state.get(parameter, {})

    def own_gradients(self) -> list[tuple[str, Tensor]]:
        """(name, this rank's part of the gradient) of every trained parameter that has one, in the model's order."""
        return [(name, p.grad) for name, p in self.named if p.grad is not None]

    def held(self, name: str, tensor: Tensor) -> Held:
        """What this rank has of `tensor`: parameter `name`, or a state of the optimiser about it."""
        return held(tensor, self.ranks.rank)

    def gradient_norm(self) -> float:
        """2-norm of the whole gradient, the same number on every rank."""
        return self.ranks.norm(gradient_norm([g for _, g in self.own_gradients()]), self.device)

    def clip_gradients(self, norm: float, max_norm: float | None) -> None:
        """Scale a gradient of `norm` down to `max_norm`; None or 0 never clips."""
        clip_gradients([g for _, g in self.own_gradients()], norm, max_norm)

    def first_non_finite(self) -> str:
        """The first parameter, in the model's order, whose gradient holds a NaN or an infinity on any rank."""
        names = [name for name, _ in self.named]
        mine = first_non_finite(self.own_gradients())
        first = self.ranks.least(names.index(mine) if mine else len(names), self.device)
        return names[first] if first < len(names) else "none alone: the norm of all gradients overflows"
