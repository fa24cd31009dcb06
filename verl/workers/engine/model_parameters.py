"""The engine's interface to a model's parameters, however they are stored or sharded."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar, TypeVarTuple

import torch
from torch import Tensor, nn

from verl.workers.engine.optimizer import clip_gradients, first_non_finite_gradient, gradient_norm
from verl.workers.engine.rank_mesh import RankMesh

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ModelParameters(ABC):
    """The parameters of one model: unsharded on one rank, or sharded over many."""

    named_parameters: list[tuple[str, nn.Parameter]]  # what the optimiser trains, by the model's names; tied ones once
    rank_mesh = RankMesh()
    device = torch.device("cpu")  # of the tensors in collectives

    can_cast = False  # whether it has `cast_to`: shards have not

    def cast_to(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """A context in which the model computes with its trained values cast to `dtype`."""
        raise NotImplementedError("shards cannot be cast; see can_cast")

    @property
    def trainable(self) -> list[nn.Parameter]:
        return [p for _, p in self.named_parameters if p.requires_grad]

    def local_trainable(self) -> list[Tensor]:
        """This rank's shard of each trained parameter, which shares its memory."""
        return [p.detach() for p in self.trainable]

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """`function(*args)` with the parameters outside the layers gathered; each layer when it is called."""
        return function(*args)

    def backward(self, loss_sum: Tensor, is_last: bool) -> None:
        """Add the gradient of the loss that `run` returned to the trained parameters.

        The last backward pass before an optimiser step sums over the ranks. After an out-of-memory error here or in
        `run`, the gradient is invalid, and `repeat_pass` must be called.
        """
        loss_sum.backward()

    def repeat_pass(self) -> None:  # noqa: B027  (for one rank nobody waits)
        """After an out-of-memory error: the next pass, with a dummy, runs only the collectives that were left."""

    @property
    def has_gradient(self) -> bool:
        """Whether anything has been added to the gradient since the last optimiser step."""
        return any(parameter.grad is not None for parameter in self.trainable)

    def zero_grad(self) -> None:
        """Drop everything that has been added to the gradient since the last optimiser step."""
        for parameter in self.trainable:
            parameter.grad = None

    def reshard(self) -> None:  # noqa: B027  (one rank gathers nothing)
        """Free the parameters that were gathered for the forward pass."""

    def copy_to_model(self) -> None:  # noqa: B027  (no copy, nothing to do)
        """Copy the trained values into the model, if it computes with a copy."""

    @abstractmethod
    def to(self, device: torch.device) -> None:
        """Move model and trained parameters; every parameter stays the same object."""

    def full_tensors(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) of every parameter, or of those with a gradient, one at a time. A collective where there
        are shards."""
        for name, parameter in self.named_parameters:
            if parameter.requires_grad or not trained_only:
                yield name, parameter.detach()

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full gradient) of every trained parameter that has one, one at a time. A collective too."""
        for name, parameter in self.named_parameters:
            if parameter.grad is not None:
                yield name, parameter.grad

    def local_gradients(self) -> list[tuple[str, Tensor]]:
        """(name, this rank's shard of the gradient) of every trained parameter that has one, in the model's order."""
        return [(name, p.grad) for name, p in self.named_parameters if p.grad is not None]

    def gradient_norm(self) -> float:
        """2-norm of the whole gradient, the same number on every rank."""
        return self.rank_mesh.norm_over_shards(gradient_norm([g for _, g in self.local_gradients()]), self.device)

    def clip_gradients(self, norm: float, max_norm: float | None) -> None:
        """Scale a gradient of `norm` down to `max_norm`; None or 0 never clips."""
        clip_gradients([g for _, g in self.local_gradients()], norm, max_norm)

    def first_non_finite_gradient(self) -> str:
        """The first parameter, in the model's order, whose gradient holds a NaN or an infinity on any rank."""
        names = [name for name, _ in self.named_parameters]
        local_name = first_non_finite_gradient(self.local_gradients())
        first = self.rank_mesh.min_over_ranks(names.index(local_name) if local_name else len(names), self.device)
        return names[first] if first < len(names) else "none alone: the norm of all gradients overflows"
