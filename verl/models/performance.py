"""Options that trade time for memory, or replace kernels, without changing what a training step computes.

An engine calls `apply_performance_options` once; each training forward runs in a context that the result makes.
"""

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from verl.config import HFModelConfig
from verl.models.rms_norm import use_fused_rms_norm
from verl.plugin.library_versions import recompute_activations

MIN_OFFLOAD_BYTES = 1 << 20  # on a device with memory of its own, smaller activations are not worth a transfer
MAX_IN_FLIGHT = 8  # copies to the host that may be under way before the device waits for the oldest
PREFETCH = 3  # activations fetched ahead in the backward pass


def apply_performance_options(
    model: nn.Module, config: HFModelConfig, trains: bool, device: torch.device
) -> Callable[[], contextlib.AbstractContextManager]:
    """Switch on what `model.*` asks for; returns the factory of the context for one training forward."""
    if config.use_liger:
        from verl.models.liger import use_liger

        use_liger(model)
    if device.type == "cpu":
        use_fused_rms_norm(model)
    if not trains:
        return contextlib.nullcontext
    if config.enable_gradient_checkpointing:
        recompute_activations(model, use_reentrant=False, preserve_rng_state=has_dropout(model))
    if not config.enable_activation_offload:
        return contextlib.nullcontext
    parameters = ParameterStorages(model)
    return lambda: OffloadedActivations(device, parameters)


# Attributes of modules that draw random numbers while training; expert routers call it jitter.
RANDOM_ATTRIBUTES = ("attention_dropout", "jitter_noise", "router_jitter_noise", "input_jitter_noise", "moe_jitter_eps")


def has_dropout(model: nn.Module) -> bool:
    """Whether two training forwards of the same tokens may differ."""
    layers = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
    return layers or any(getattr(m, name, 0.0) for m in model.modules() for name in RANDOM_ATTRIBUTES)


class ParameterStorages:
    """The memory of a model's parameters, all-gathered ones included: what modules have when they are called."""

    def __init__(self, model: nn.Module):
        self._storages: dict[int, StorageWeakRef] = {}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda module, _: self._add(module))

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._storages

    def _add(self, module: nn.Module) -> None:
        for value in (*module._parameters.values(), *vars(module).values()):
            if isinstance(value, Tensor) and type(value) in (Tensor, nn.Parameter):
                storage = value.untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage)


class _OffloadedTensor:
    """One activation: its copy on the host and, once requested or prefetched, its copy on the device."""

    def __init__(self, host: Tensor):
        self.host = host
        self.on_device: Tensor | None = None
        self.ready_event: Any = None


class OffloadedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Inside the block, what autograd saves for backward moves to host memory, and returns when backward needs it.

    Parameters stay in place, and so do activations below `min_bytes`. A tensor saved by several operations is copied
    once. On a device with streams the copies in both directions overlap with computation, on their own stream, and
    backward prefetches in reverse order. On a CPU the copy gains nothing; it is made so that the path can be tested.
    Values return bit for bit.
    """

    def __init__(self, device: torch.device, parameters: ParameterStorages | None = None):
        super().__init__(self._pack_hook, self._unpack_hook)
        self.device, self.parameters = device, parameters if parameters is not None else ()
        self.stream = None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
        self.min_bytes = 0 if self.stream is None else MIN_OFFLOAD_BYTES
        self.offloaded: list[_OffloadedTensor] = []
        self.offloaded_bytes = 0
        self._seen: dict[tuple, tuple[int, StorageWeakRef]] = {}
        self._in_flight: deque[tuple[Any, Tensor]] = deque()
        self._fetched: deque[_OffloadedTensor] = deque()

    def _pack_hook(self, tensor: Tensor) -> Tensor | int:
        if tensor.device.type != self.device.type or type(tensor) is not Tensor or tensor in self.parameters:
            return tensor
        if tensor.numel() * tensor.element_size() < max(1, self.min_bytes):
            return tensor
        storage = StorageWeakRef(tensor.untyped_storage())  # while it exists, no other storage gets its number
        key = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor._version, tensor.dtype)
        if key not in self._seen:
            self._seen[key] = len(self.offloaded), storage
            self.offloaded.append(self._to_host(tensor))
            self.offloaded_bytes += tensor.numel() * tensor.element_size()
        return self._seen[key][0]

    def _unpack_hook(self, saved: Tensor | int) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if self.stream is None:
            return self.offloaded[saved].host
        for index in range(saved, max(-1, saved - 1 - PREFETCH), -1):
            self._fetch(self.offloaded[index])
        entry = self.offloaded[saved]
        assert entry.on_device is not None
        current = torch.get_device_module(self.device).current_stream()
        current.wait_event(entry.ready_event)
        entry.on_device.record_stream(current)
        return entry.on_device

    def _to_host(self, tensor: Tensor) -> _OffloadedTensor:
        if self.stream is None:
            return _OffloadedTensor(tensor.clone())
        module = torch.get_device_module(self.device)
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(module.current_stream())
        with module.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
            copied = self.stream.record_event()
        self._in_flight.append((copied, tensor))
        if len(self._in_flight) > MAX_IN_FLIGHT:  # its memory may be reused after this point of the stream
            module.current_stream().wait_event(self._in_flight.popleft()[0])
        return _OffloadedTensor(host)

    def _fetch(self, entry: _OffloadedTensor) -> None:
        if entry.on_device is not None:
            return
        with torch.get_device_module(self.device).stream(self.stream):
            entry.on_device = entry.host.to(self.device, non_blocking=True)
            entry.ready_event = self.stream.record_event()
        self._fetched.append(entry)
        if len(self._fetched) > 2 * (PREFETCH + 1):
            self._fetched.popleft().on_device = None  # autograd has a reference to what it still needs

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._seen.clear()
        while self._in_flight:
            torch.get_device_module(self.device).current_stream().wait_event(self._in_flight.popleft()[0])
