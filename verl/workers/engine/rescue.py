"""A rank that runs out of memory goes through the rest of the pass without computing: the others wait for it.

FSDP2 gathers and reduces at every layer, forward and backward, on all ranks. Where an allocator fails on one of them,
its later layers hand on what they get, layers that are not reached are called with nothing, and the collectives of the
backward pass are made with gradients of zero. The allocator's error is raised when the ranks are level again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from verl.workers.engine.memory import ran_out

T = TypeVar("T")


class Rescue:
    """Guards the forward pass of a model sharded by layers, and completes a backward pass that failed."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module]):
        self.model, self.layers = model, layers  # in forward order
        self.lost: RuntimeError | None = None  # what an allocator said in this pass
        self._reached: set[nn.Module] = set()
        self._in_forward = False
        for layer in layers:
            self._guard(layer)

    def run(self, function: Callable[[], T]) -> T | None:
        """`function()`; None with `lost` set where it ran out of memory, after every layer was called."""
        self.lost, self._in_forward = None, True
        self._reached.clear()
        try:
            result = function()
        except Exception as error:
            if self.lost is None:
                self.lost = without_frames(error)
            result = None  # otherwise a consequence of layers that were passed over
        finally:
            self._in_forward = self.lost is not None
        if self.lost is None:
            return result
        for layer in self.layers:
            if layer not in self._reached:
                layer(torch.zeros(1, device=next(layer.parameters()).device))
        self._in_forward = False
        return None

    def finish_backward(self) -> None:
        """The collectives of a backward pass that this rank did not come to, last layer first, the root at the end."""
        root, *layers = [_state(module) for module in (self.model, *reversed(self.layers))]
        for state in (root, *layers):
            for group in reversed(_groups(state)):
                if group._training_state.name == "POST_BACKWARD":
                    continue
                group.pre_backward(True)
                if group.reduce_grads:
                    _fill_with_zeros(group)
                if state is not root:
                    group.post_backward()
        root._root_post_backward_final_callback()

    def _guard(self, layer: nn.Module) -> None:
        forward = layer.forward

        @functools.wraps(forward)
        def compute_or_pass(*args: Any, **kwargs: Any) -> Any:
            if not self._in_forward:  # recomputed by the backward pass
                return forward(*args, **kwargs)
            self._reached.add(layer)
            if self.lost is None:
                try:
                    return forward(*args, **kwargs)
                except RuntimeError as error:
                    self.lost = without_frames(error)
            return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)).detach()

        layer.forward = compute_or_pass


def without_frames(error: Exception) -> RuntimeError:
    """A copy of an allocator's error that keeps no tensors alive; any other error is raised."""
    if not isinstance(error, RuntimeError) or not ran_out(error):
        raise error
    return type(error)(str(error))


def _state(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def _groups(state: Any) -> list[Any]:
    """The parameter groups of one module; until torch 2.12 there was one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _fill_with_zeros(group: Any) -> None:
    for held in group.fsdp_params:
        parameter = held.unsharded_param
        if parameter.requires_grad and parameter.grad is None and held.unsharded_accumulated_grad is None:
            parameter.grad = torch.zeros_like(parameter)
