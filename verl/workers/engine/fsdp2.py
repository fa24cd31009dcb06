"""FSDP2: parameters as DTensors over many ranks."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from verl.config import FSDPEngineConfig
from verl.models.device_moves import move_model
from verl.models.expert_parallel import divide_experts
from verl.plugin.library_versions import forget_forward_pass
from verl.workers.engine.fsdp2_collectives import FSDP2Collectives
from verl.workers.engine.fsdp_units import sharding_units
from verl.workers.engine.model_parameters import ModelParameters, T, Ts
from verl.workers.engine.oom_deadlock_guard import OOMDeadlockGuard
from verl.workers.engine.precision import Precision
from verl.workers.engine.rank_mesh import RankMesh
from verl.workers.engine.shared_memory_collectives import SharedMemoryCollectives

META = torch.device("meta")


class FSDP2Parameters(ModelParameters):
    """A model sharded by FSDP2: its parameters are DTensors, all-gathered layer by layer to compute.

    Rank 0 has the initial values, the other ranks only the structure; they never hold more than their shards and one
    full tensor. Gradients are summed over the ranks, in `precision.reduce`, at the last micro-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        rank_mesh: RankMesh,
        config: FSDPEngineConfig,
        precision: Precision,
        device: torch.device,
    ):
        self.model, self.rank_mesh, self.device = model, rank_mesh, device
        self.offloads_shards = config.offload_policy  # FSDP moves the shards itself
        source = tensors_by_name(model) if rank_mesh.rank == 0 else {}
        move_model(model, META)
        mesh = rank_mesh.expert_mesh
        self._experts = [] if mesh is None else divide_experts(model, mesh["experts"])
        add_run_argument(model)
        self._modules = self._shard(config, precision)
        self._deadlock_guard = OOMDeadlockGuard(self._count_collectives(), self._forget_pass, rank_mesh.stop_group)
        parameter_device = torch.device("cpu") if self.offloads_shards else device
        convert_keeping_parameters(lambda: model.to_empty(device=parameter_device))
        if self.offloads_shards:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(device)
        self._distribute_values(source)
        self.named_parameters = list(model.named_parameters())

    def _shard(self, config: FSDPEngineConfig, precision: Precision) -> list[FSDPModule]:
        """Shard the model; the root and its units, in forward order."""
        options: dict[str, Any] = {
            "mesh": self.rank_mesh.shard_mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
            if self.offloads_shards
            else OffloadPolicy(),
        }
        for experts in self._experts:  # each rank has other experts; over the ranks that have the same ones
            fully_shard(
                experts,
                reshard_after_forward=config.reshard_after_forward,
                shard_placement_fn=lambda _: Shard(1),
                **{**options, "mesh": self.rank_mesh.expert_shard_mesh},
            )
        units = [unit for unit in sharding_units(self.model, config.wrap_policy) if unit not in self._experts]
        for unit in reversed(units):
            fully_shard(unit, reshard_after_forward=config.reshard_after_forward, **options)
        fully_shard(self.model, reshard_after_forward=False, **options)
        modules = [module for module in self.model.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if config.forward_prefetch:
            for module, next_module in itertools.pairwise(modules):
                module.set_modules_to_forward_prefetch([next_module])
        return modules

    def _count_collectives(self) -> list[FSDP2Collectives]:
        mesh = self.rank_mesh.shard_mesh
        assert mesh is not None
        memory = SharedMemoryCollectives.create(self.rank_mesh.shard_group) if self.device.type == "cpu" else None
        return [
            FSDP2Collectives(module, None if module in self._experts else memory, has_copies=mesh.ndim > 1)
            for module in self._modules
        ]

    @torch.no_grad()
    def _distribute_values(self, source: dict[str, Tensor]) -> None:
        """Fill every rank's shards with rank 0's values, one tensor at a time."""
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            full = broadcast(source.get(name), tensor.shape, tensor.dtype, self.device)
            if isinstance(tensor, DTensor):
                part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
                tensor.to_local().copy_(part.to_local())
            else:
                tensor.copy_(full)

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        with self._deadlock_guard.forward_pass():
            return self.model(run=functools.partial(function, *args))

    def backward(self, loss_sum: Tensor, is_last: bool) -> None:
        self._modules[0].set_requires_gradient_sync(is_last)
        self._deadlock_guard.backward(loss_sum)

    def repeat_pass(self) -> None:
        self._deadlock_guard.repeat_pass()

    def _forget_pass(self) -> None:
        forget_forward_pass(self.model)

    def reshard(self) -> None:
        for module in self._modules:
            module.reshard()

    def to(self, device: torch.device) -> None:
        if not self.offloads_shards:
            move_model(self.model, device)

    def full_tensors(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters:
            if parameter.requires_grad or not trained_only:
                yield name, self._full_tensor(parameter.detach())

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters:
            if parameter.grad is not None:
                yield name, self._full_tensor(parameter.grad)

    def _full_tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device).full_tensor()

    def local_trainable(self) -> list[Tensor]:
        return [p.detach().to_local() for p in self.trainable]

    def local_gradients(self) -> list[tuple[str, Tensor]]:
        return [(name, gradient.to_local()) for name, gradient in super().local_gradients()]


def tensors_by_name(model: nn.Module) -> dict[str, Tensor]:
    """The detached tensors of a model, by each of their names."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in tensors}


def broadcast(value: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rank 0's `value` on every rank."""
    full = torch.empty(shape, dtype=dtype, device=device)
    if value is not None:
        full.copy_(value)
    dist.broadcast(full, src=0)
    return full


def add_run_argument(model: nn.Module) -> None:
    """Make `model(run=f)` call `f()` inside its forward hooks; other calls are unchanged."""
    forward = model.forward

    @functools.wraps(forward)
    def forward_or_run(*args: Any, run: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if run is None else run()

    model.forward = forward_or_run


def convert_keeping_parameters(convert: Callable[[], Any]) -> None:
    """Run `convert()` so that conversions of a module keep its parameter objects, tied ones included."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        convert()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
