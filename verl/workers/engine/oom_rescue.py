"""A rank that runs out of memory still runs all collectives of the pass, without computing.

FSDP runs an all-gather and a reduce-scatter at every layer, forward and backward, on all ranks. After an allocation
fails on one rank, in a layer or in an all-gather, its later layers return their input, layers that are not reached are
called with a dummy input, and the backward collectives run with zero gradients. The allocator's error is raised after
the last collective. Ranks that split sequences stop together, see `ulysses.check_peers`.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp import _runtime_utils as fsdp1_runtime
from torch.distributed.fsdp._flat_param import HandleTrainingState
from torch.utils._pytree import tree_leaves

from verl.models.attention.ulysses import (
    PeerOutOfMemory,
    announce_out_of_memory,
    check_peers,
    clear_out_of_memory,
)
from verl.plugin.platform import get_platform
from verl.workers.engine.out_of_memory import is_out_of_memory

T = TypeVar("T")


class OOMRescue(ABC):
    """Runs the passes of a model sharded by layers. `root(f)` calls f inside the hooks that all-gather the root."""

    def __init__(
        self, root: Callable[[Callable[[], Any]], Any], layers: Sequence[nn.Module], sequence_group: Any = None
    ):
        self.root, self.layers, self.sequence_group = root, layers, sequence_group  # layers in forward order
        self.oom_error: RuntimeError | None = None  # the allocator's error in this pass
        self._called_layers: set[nn.Module] = set()
        self._in_forward = False
        self._pending_notice: dist.Work | None = None
        self._failed_collectives: list[Callable[[], None]] = []  # of this pass, to retry
        for layer in layers:
            self._wrap_forward(layer)

    def run(self, function: Callable[[], T]) -> T:
        """`function()`; an out-of-memory error is raised after every collective of both passes has run."""
        self.oom_error, self._in_forward = None, True
        self._called_layers.clear()
        if self.sequence_group is not None:
            clear_out_of_memory(self.sequence_group)
        try:
            try:
                result = self.root(functools.partial(self._compute, function))
            except RuntimeError as error:
                if self.oom_error is not None:
                    raise
                self._record_error(error)  # in the all-gather of the root
            if self.oom_error is not None and not self._called_layers:
                self.root(self._skip_layers)
        finally:
            self._in_forward = False
            self._failed_collectives.clear()  # their layers were called again, which retried them
        if self.oom_error is None:
            if self.sequence_group is not None and not torch.is_grad_enabled():
                check_peers(self.sequence_group)
            return result
        if torch.is_grad_enabled():
            self._finish()
        raise self._error_after_notice()

    def backward(self, loss_sum: Tensor) -> None:
        """The backward pass of what `run` returned; raises out-of-memory errors as `run` does."""
        try:
            loss_sum.backward()
        except RuntimeError as error:
            self._record_error(error)
        if self.oom_error is not None:
            self._finish()
            raise self._error_after_notice()
        if self.sequence_group is not None:
            check_peers(self.sequence_group)

    @abstractmethod
    def finish_backward(self) -> None:
        """Run the backward collectives that this rank did not reach, last layer first, the root at the end."""

    def _compute(self, function: Callable[[], T]) -> T | None:
        try:
            result = function()
        except Exception as error:
            if self.oom_error is None:
                self._record_error(error)
        if self.oom_error is None:
            return result
        self._skip_layers()  # also if the error was a consequence of skipped layers
        return None

    def _skip_layers(self) -> None:
        get_platform().empty_cache()
        for layer in self.layers:
            if _computing_module(layer) not in self._called_layers:
                layer(torch.zeros(1, device=next(layer.parameters()).device))

    def _wrap_forward(self, layer: nn.Module) -> None:
        inner = _computing_module(layer)
        forward = inner.forward

        @functools.wraps(forward)
        def compute_or_skip(*args: Any, **kwargs: Any) -> Any:
            if not self._in_forward:  # recomputation in the backward pass
                return forward(*args, **kwargs)
            self._called_layers.add(inner)
            if self.oom_error is None:
                try:
                    return forward(*args, **kwargs)
                except RuntimeError as error:
                    self._record_error(error)
            return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)).detach()

        inner.forward = compute_or_skip

    def _record_error(self, error: Exception) -> None:
        self.oom_error = without_frames(error)
        if self.sequence_group is not None and not isinstance(error, PeerOutOfMemory):
            self._pending_notice = announce_out_of_memory(self.sequence_group)

    def _finish(self) -> None:
        get_platform().empty_cache()
        self.finish_backward()

    def _error_after_notice(self) -> RuntimeError:
        assert self.oom_error is not None
        if self._pending_notice is not None:
            self._pending_notice.wait()
            self._pending_notice = None
        return self.oom_error


class FSDP2Rescue(OOMRescue):
    """The rescue for FSDP2. All-gathers and reduce-scatters that failed are retried first."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], sequence_group: Any = None):
        super().__init__(lambda function: model(run=function), layers, sequence_group)
        self.model = model
        for group in self._groups():
            group.unshard = self._recording_failures(group.unshard, functools.partial(_unshard, group))
            group.post_backward = self._recording_failures(
                group.post_backward, functools.partial(_reduce_gradients, group)
            )

    def finish_backward(self) -> None:
        for retry in self._failed_collectives:
            retry()
        self._failed_collectives.clear()
        root = _fsdp_state(self.model)
        for group in self._groups():
            if group._training_state.name == "POST_BACKWARD":
                continue
            group.pre_backward(True)
            _unshard(group)
            if group._post_forward_indices:  # its all-gather failed before it prefetched the next one
                group._backward_prefetch()
            if group not in _param_groups(root):
                _reduce_gradients(group)
            elif group.reduce_grads:
                _zero_missing_gradients(group)
        root._root_post_backward_final_callback()

    def _groups(self) -> list[Any]:
        """Parameter groups in the order of the backward pass."""
        return [
            group
            for module in (self.model, *reversed(self.layers))
            for group in reversed(_param_groups(_fsdp_state(module)))
        ]

    def _recording_failures(self, function: Callable[..., None], retry: Callable[[], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call_or_record(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except RuntimeError:
                self._failed_collectives.append(retry)
                raise

        return call_or_record


def _unshard(group: Any) -> None:
    """All-gather the parameters of `group`, unless they are gathered already."""
    group.unshard(group.unshard_async_op)
    group.wait_for_unshard()


def _reduce_gradients(group: Any) -> None:
    if group.reduce_grads:
        _zero_missing_gradients(group)
    group.post_backward()


class FSDP1Rescue(OOMRescue):
    """The rescue for FSDP1. `root` and `layers` are its wrappers."""

    def finish_backward(self) -> None:
        root: Any = self.root
        if not root._post_backward_callback_queued:  # the backward pass failed before it queued it
            fsdp1_runtime._reset_flat_param_grad_info_if_needed(root._all_handles)
        root._post_backward_callback_queued = True
        units: list[Any] = [module for module in (root, *reversed(self.layers)) if module._handle is not None]
        for unit in units:
            unit._handle._needs_pre_backward_unshard |= not unit._handle._ran_pre_backward_hook
        for unit in units:
            if unit._handle._training_state != HandleTrainingState.BACKWARD_POST:
                fsdp1_runtime._pre_backward_hook(unit, unit, unit._handle, None)
                if unit is not root:
                    _reduce_flat_gradient(unit)
        if root._handle is not None:
            _reduce_flat_gradient(root)
        fsdp1_runtime._post_backward_final_callback(root, root)


def _reduce_flat_gradient(unit: Any) -> None:
    parameter = unit._handle.flat_param
    if parameter.requires_grad and unit._sync_gradients:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        fsdp1_runtime._post_backward_hook(unit, unit._handle, parameter)


def without_frames(error: Exception) -> RuntimeError:
    """A copy of an allocator's error that keeps no tensors alive; any other error is raised."""
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        raise error
    return type(error)(str(error))


def _computing_module(layer: nn.Module) -> nn.Module:
    """The module inside FSDP1's wrapper, or `layer` itself without a wrapper."""
    return layer.module if isinstance(layer, FullyShardedDataParallel) else layer


def _fsdp_state(module: nn.Module) -> Any:
    assert isinstance(module, FSDPModule)
    return module._get_fsdp_state()


def _param_groups(state: Any) -> list[Any]:
    """The parameter groups of one module; before torch 2.12 at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _zero_missing_gradients(group: Any) -> None:
    for fsdp_param in group.fsdp_params:
        parameter = fsdp_param.unsharded_param
        if parameter.requires_grad and parameter.grad is None and fsdp_param.unsharded_accumulated_grad is None:
            parameter.grad = torch.zeros_like(parameter)
