"""A rank that runs out of memory goes through the rest of the pass without computing: the others wait for it.

FSDP gathers and reduces at every layer, forward and backward, on all ranks. Where an allocator fails on one of them, be
it for a layer or for the gathering itself, its later layers hand on what they get, layers that are not reached are
called with nothing, and the collectives of the backward pass are made with gradients of zero. The allocator's error is
raised when the ranks are level again. Ranks that share sequences stop together, see `sequence_parallel.ask`.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import _runtime_utils as flat
from torch.distributed.fsdp._flat_param import HandleTrainingState
from torch.utils._pytree import tree_leaves

from verl.models.sequence_parallel import PeerRanOut, ask, give_up, go_on
from verl.plugin.platform import get_platform
from verl.workers.engine.memory import ran_out

T = TypeVar("T")


class Rescue(ABC):
    """Guards the passes of a model sharded by layers. `root(f)` calls f inside the hooks that gather the root."""

    def __init__(self, root: Callable[[Callable[[], Any]], Any], layers: Sequence[nn.Module], sharers: Any = None):
        self.root, self.layers, self.sharers = root, layers, sharers  # layers in forward order
        self.lost: RuntimeError | None = None  # what an allocator said in this pass
        self._reached: set[nn.Module] = set()
        self._in_forward = False
        self._told: dist.Work | None = None
        self._broken: list[Callable[[], None]] = []  # collectives that failed in this pass, to be made again
        for layer in layers:
            self._guard(layer)

    def run(self, function: Callable[[], T]) -> T:
        """`function()`; where memory runs out its error is raised after every collective of both passes is made."""
        self.lost, self._in_forward = None, True
        self._reached.clear()
        if self.sharers is not None:
            go_on(self.sharers)
        try:
            try:
                result = self.root(functools.partial(self._compute, function))
            except RuntimeError as error:
                if self.lost is not None:
                    raise
                self._lose(error)  # while the root was gathered
            if self.lost is not None and not self._reached:
                self.root(self._pass_over)
        finally:
            self._in_forward = False
            self._broken.clear()  # layers that were called again have gathered
        if self.lost is None:
            if self.sharers is not None and not torch.is_grad_enabled():
                ask(self.sharers)
            return result
        if torch.is_grad_enabled():
            self._finish()
        raise self._settled()

    def backward(self, loss_sum: Tensor) -> None:
        """The backward pass of what `run` returned; fails as that does."""
        try:
            loss_sum.backward()
        except RuntimeError as error:
            self._lose(error)
        if self.lost is not None:
            self._finish()
            raise self._settled()
        if self.sharers is not None:
            ask(self.sharers)

    @abstractmethod
    def finish_backward(self) -> None:
        """The collectives of a backward pass that this rank did not come to, last layer first, the root at the end."""

    def _compute(self, function: Callable[[], T]) -> T | None:
        try:
            result = function()
        except Exception as error:
            if self.lost is None:
                self._lose(error)
        if self.lost is None:
            return result
        self._pass_over()  # also where the error was a consequence of layers that were passed over
        return None

    def _pass_over(self) -> None:
        get_platform().empty_cache()
        for layer in self.layers:
            if _inner(layer) not in self._reached:
                layer(torch.zeros(1, device=next(layer.parameters()).device))

    def _guard(self, layer: nn.Module) -> None:
        inner = _inner(layer)
        forward = inner.forward

        @functools.wraps(forward)
        def compute_or_pass(*args: Any, **kwargs: Any) -> Any:
            if not self._in_forward:  # recomputed by the backward pass
                return forward(*args, **kwargs)
            self._reached.add(inner)
            if self.lost is None:
                try:
                    return forward(*args, **kwargs)
                except RuntimeError as error:
                    self._lose(error)
            return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)).detach()

        inner.forward = compute_or_pass

    def _lose(self, error: Exception) -> None:
        self.lost = without_frames(error)
        if self.sharers is not None and not isinstance(error, PeerRanOut):
            self._told = give_up(self.sharers)

    def _finish(self) -> None:
        get_platform().empty_cache()
        self.finish_backward()

    def _settled(self) -> RuntimeError:
        assert self.lost is not None
        if self._told is not None:
            self._told.wait()
            self._told = None
        return self.lost


class ShardedRescue(Rescue):
    """Of FSDP2. Gathers and reductions that fail are made again before anything else."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], sharers: Any = None):
        super().__init__(lambda function: model(run=function), layers, sharers)
        self.model = model
        for group in self._groups():
            group.unshard = self._noting(group.unshard, functools.partial(_gather, group))
            group.post_backward = self._noting(group.post_backward, functools.partial(_reduce, group))

    def finish_backward(self) -> None:
        for again in self._broken:
            again()
        self._broken.clear()
        root = _state(self.model)
        for group in self._groups():
            if group._training_state.name == "POST_BACKWARD":
                continue
            group.pre_backward(True)
            _gather(group)
            if group._post_forward_indices:  # its own gather failed before it came to the next one
                group._backward_prefetch()
            if group not in _of(root):
                _reduce(group)
            elif group.reduce_grads:
                _fill_with_zeros(group)
        root._root_post_backward_final_callback()

    def _groups(self) -> list[Any]:
        """Parameter groups in the order of the backward pass."""
        return [group for module in (self.model, *reversed(self.layers)) for group in reversed(_of(_state(module)))]

    def _noting(self, function: Callable[..., None], again: Callable[[], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except RuntimeError:
                self._broken.append(again)
                raise

        return noting


def _gather(group: Any) -> None:
    """Nothing where it is gathered already."""
    group.unshard(group.unshard_async_op)
    group.wait_for_unshard()


def _reduce(group: Any) -> None:
    if group.reduce_grads:
        _fill_with_zeros(group)
    group.post_backward()


class FlatRescue(Rescue):
    """Of FSDP1: `root` and `layers` are its wrappers."""

    def finish_backward(self) -> None:
        root: Any = self.root
        if not root._post_backward_callback_queued:  # by a backward pass that failed
            flat._reset_flat_param_grad_info_if_needed(root._all_handles)
        root._post_backward_callback_queued = True
        units: list[Any] = [module for module in (root, *reversed(self.layers)) if module._handle is not None]
        for unit in units:
            unit._handle._needs_pre_backward_unshard |= not unit._handle._ran_pre_backward_hook
        for unit in units:
            if unit._handle._training_state != HandleTrainingState.BACKWARD_POST:
                flat._pre_backward_hook(unit, unit, unit._handle, None)
                if unit is not root:
                    _reduce_flat(unit)
        if root._handle is not None:
            _reduce_flat(root)
        flat._post_backward_final_callback(root, root)


def _reduce_flat(unit: Any) -> None:
    parameter = unit._handle.flat_param
    if parameter.requires_grad and unit._sync_gradients:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        flat._post_backward_hook(unit, unit._handle, parameter)


def without_frames(error: Exception) -> RuntimeError:
    """A copy of an allocator's error that keeps no tensors alive; any other error is raised."""
    if not isinstance(error, RuntimeError) or not ran_out(error):
        raise error
    return type(error)(str(error))


def _inner(layer: nn.Module) -> nn.Module:
    """The module that computes, where `layer` is FSDP1's wrapper around it."""
    return layer.module if isinstance(layer, FullyShardedDataParallel) else layer


def _state(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def _of(state: Any) -> list[Any]:
    """The parameter groups of one module; until torch 2.12 there was one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _fill_with_zeros(group: Any) -> None:
    for held in group.fsdp_params:
        parameter = held.unsharded_param
        if parameter.requires_grad and parameter.grad is None and held.unsharded_accumulated_grad is None:
            parameter.grad = torch.zeros_like(parameter)
