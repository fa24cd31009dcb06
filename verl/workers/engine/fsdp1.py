"""FSDP1: parameters in flat shards over many ranks."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._flat_param import HandleTrainingState
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.wrap import CustomPolicy

from verl.config import FSDPEngineConfig
from verl.models.device_moves import move_model
from verl.utils.errors import ConfigError
from verl.workers.engine.fsdp2 import META, broadcast, convert_keeping_parameters, tensors_by_name
from verl.workers.engine.fsdp_units import sharding_units
from verl.workers.engine.model_parameters import ModelParameters, T, Ts
from verl.workers.engine.oom_rescue import OOMRescue, UnitCollectives, copy_to_all_parts
from verl.workers.engine.precision import Precision
from verl.workers.engine.rank_mesh import RankMesh
from verl.workers.engine.tensor_shards import LocalShard, boxes_of_range


class FSDP1Parameters(ModelParameters):
    """A model sharded by FSDP1: each unit is flattened and split into equal parts, one per rank.

    The optimiser trains this rank's slice of each parameter's elements, which may be empty. FSDP1 averages gradients
    over all ranks, so the loss is multiplied by their number.
    """

    def __init__(
        self,
        model: nn.Module,
        rank_mesh: RankMesh,
        config: FSDPEngineConfig,
        precision: Precision,
        device: torch.device,
    ):
        self.rank_mesh, self.device = rank_mesh, device
        self.gradient_scale = float(rank_mesh.world_size)
        # Gradients accumulate in the compute dtype before the reduction, so it must equal the reduce dtype.
        self._defers_reduction = precision.compute == precision.reduce
        self._no_sync = contextlib.ExitStack()
        if len({parameter.dtype for parameter in model.parameters()}) > 1:
            raise ConfigError(
                "strategy=fsdp holds frozen weights and LoRA adapters in one type, and adapters are float32; use "
                "fsdp_config.model_dtype=fp32, or strategy=fsdp2"
            )
        if rank_mesh.shard_size == 1 and len({parameter.requires_grad for parameter in model.parameters()}) > 1:
            raise ConfigError(
                "strategy=fsdp with fsdp_size=1 takes no model that is frozen in part (model.lora_rank); leave "
                "fsdp_size at -1, or use strategy=fsdp2"
            )
        shapes = [parameter.shape for parameter in model.parameters()]
        fill_module = _make_param_init_fn(model, tensors_by_name(model) if rank_mesh.rank == 0 else {}, device)
        move_model(model, META)
        units = {id(unit) for unit in sharding_units(model, config.wrap_policy)}
        with without_advice_on_frozen_weights():
            self._root = FullyShardedDataParallel(
                _CallInForward(model),
                **_sharding_options(rank_mesh, config.reshard_after_forward),
                auto_wrap_policy=CustomPolicy(lambda module: id(module) in units),
                mixed_precision=MixedPrecision(
                    param_dtype=precision.compute,
                    reduce_dtype=precision.reduce,
                    cast_forward_inputs=False,
                    cast_root_forward_inputs=False,
                ),
                forward_prefetch=config.forward_prefetch,
                device_id=device,
                param_init_fn=fill_module,
                use_orig_params=True,
            )
        self._modules = [m for m in FullyShardedDataParallel.fsdp_modules(self._root) if m._handle is not None]
        collectives = [FSDP1Collectives(module) for module in self._modules]
        self._oom_rescue = OOMRescue(collectives, self._forget_pass, rank_mesh.sequence_group)
        _forward_through_root(model, self._root)
        self.named_parameters = [(self.unwrapped_name(name), parameter) for name, parameter in model.named_parameters()]
        self._shapes = dict(zip((name for name, _ in self.named_parameters), shapes, strict=True))
        self._slice_sizes = self._gather_slice_sizes()

    def _gather_slice_sizes(self) -> dict[str, list[int]]:
        """The number of elements of each parameter on every rank of the shard group."""
        local = torch.tensor([parameter.numel() for _, parameter in self.named_parameters], device=self.device)
        sizes = self._all_gather(local)
        return dict(zip((name for name, _ in self.named_parameters), sizes.T.tolist(), strict=True))

    def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        with self._oom_rescue.forward_pass():
            return self._root(functools.partial(function, *args))

    def backward(self, loss_sum: Tensor, is_last: bool) -> None:
        self._no_sync.close()
        if self._defers_reduction and not is_last:
            self._no_sync.enter_context(self._root.no_sync())
        self._oom_rescue.backward(loss_sum * self.gradient_scale)

    def repeat_pass(self) -> None:
        self._oom_rescue.repeat_pass()

    def _forget_pass(self) -> None:
        self.zero_grad()
        for module in self._modules:
            module._handle._training_state = HandleTrainingState.IDLE
            _reshard(module, module._handle, module._handle.uses_sharded_strategy)

    def zero_grad(self) -> None:
        super().zero_grad()
        for module in self._modules:
            module._handle.flat_param.grad = None

    def reshard(self) -> None:
        for module in self._modules:
            if module._handle.uses_sharded_strategy:
                _reshard(module, module._handle, True)

    def to(self, device: torch.device) -> None:
        for module in self._modules:
            handle = module._handle
            handle.flat_param_to(device)
            handle.flat_param._local_shard = handle.flat_param.data
            handle._use_sharded_views()
        for buffers in (module._buffers for module in self._root.modules()):
            for name, buffer in buffers.items():
                buffers[name] = None if buffer is None else buffer.to(device)

    @torch.no_grad()
    def full_tensors(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters:
            if parameter.requires_grad or not trained_only:
                yield name, self.full_tensor(name, parameter.detach())

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.named_parameters:
            if parameter.requires_grad:
                empty = parameter.detach().new_zeros(parameter.numel())
                yield name, self.full_tensor(name, empty if parameter.grad is None else parameter.grad)

    def full_tensor(self, name: str, part: Tensor) -> Tensor:
        """The full tensor in the shape of parameter `name`; `part` is this rank's slice of it. A collective."""
        sizes = self._slice_sizes[name]
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=part.dtype, device=self.device)
        padded[: part.numel()] = part.flatten()
        parts = self._all_gather(padded)
        return torch.cat([row[:size] for row, size in zip(parts, sizes, strict=True)]).view(self._shapes[name])

    def unwrapped_name(self, name: str) -> str:
        return name.replace("_fsdp_wrapped_module.", "")

    def structure(self) -> dict[str, Tensor]:
        return {name: torch.empty(self._shapes[name], dtype=p.dtype, device=META) for name, p in self.named_parameters}

    def optimizer_state(self, optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
        """For a parameter with no elements on this rank: the states of other parameters, but empty."""
        state = optimizer.state.get(parameter, {})
        if state or parameter.numel() or not parameter.requires_grad:
            return state
        other: dict[str, Any] = next(iter(optimizer.state.values()), {})
        return {key: v[:0] if isinstance(v, Tensor) and v.dim() else v for key, v in other.items()}

    def local_shard(self, name: str, tensor: Tensor) -> LocalShard:
        if tensor.dim() == 0:
            return super().local_shard(name, tensor)
        mesh, sizes = self.rank_mesh.shard_mesh, self._slice_sizes[name]
        assert mesh is not None
        start = sum(sizes[: dist.get_rank(self.rank_mesh.shard_group)])
        boxes = boxes_of_range(self._shapes[name], start, start + tensor.numel())
        is_copy = mesh.ndim > 1 and mesh.get_local_rank("replicate") > 0
        return LocalShard(tuple(self._shapes[name]), boxes, tensor.detach().flatten(), bool(boxes) and not is_copy)

    def _all_gather(self, local: Tensor) -> Tensor:
        """`local` of each rank of the shard group, one row per rank."""
        rows = local.new_empty(self.rank_mesh.shard_size * len(local))
        dist.all_gather_into_tensor(rows, local, self.rank_mesh.shard_group)
        return rows.view(-1, len(local))


class FSDP1Collectives(UnitCollectives):
    """All-gathers of one unit. What reduces its gradient is FSDP1's own."""

    def __init__(self, unit: Any):
        super().__init__()
        self.unit, self._was_gathered = unit, False
        self._gather = unit._handle._all_gather_flat_param
        unit._handle._all_gather_flat_param = self._all_gather

    def is_gathered(self) -> bool:
        return self._was_gathered and not self.unit._handle.needs_unshard()  # which fails before the first

    def has_reduced(self) -> bool:
        return self.unit._sync_gradients and self.unit._handle._training_state == HandleTrainingState.BACKWARD_POST

    def set_reduces(self, reduces: bool) -> None:
        self.unit._sync_gradients = reduces

    def _all_gather(self, full: Tensor) -> Tensor:
        self._was_gathered = True
        local = self.unit._handle.flat_param.data
        self.run(lambda: self._gather(full), lambda: copy_to_all_parts(full, local))
        return full


@contextlib.contextmanager
def without_advice_on_frozen_weights() -> Iterator[None]:
    """Suppress torch's list of every parameter in units that are frozen in part; docs/lora.md says what it costs."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*has both parameters with requires_grad=True and False")
        yield


class _CallInForward(nn.Module):
    """Runs a function inside the hooks that all-gather the parameters of the root."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


def _make_param_init_fn(
    model: nn.Module, source: dict[str, Tensor], device: torch.device
) -> Callable[[nn.Module], None]:
    """A function that fills a module's own tensors with rank 0's values; all ranks must call it in the same order."""
    names = {id(module): f"{name}." if name else "" for name, module in model.named_modules()}

    @torch.no_grad()
    def fill_module(module: nn.Module) -> None:
        convert_keeping_parameters(lambda: module.to_empty(device=device, recurse=False))
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            tensor.copy_(broadcast(source.get(names[id(module)] + name), tensor.shape, tensor.dtype, device))

    return fill_module


def _sharding_options(rank_mesh: RankMesh, reshard: bool) -> dict[str, Any]:
    """FSDP1's arguments for process groups and sharding strategy."""
    assert rank_mesh.shard_mesh is not None
    if rank_mesh.shard_size == 1:
        return {"sharding_strategy": ShardingStrategy.NO_SHARD}
    if rank_mesh.shard_mesh.ndim == 1:
        strategy = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
        return {"process_group": rank_mesh.shard_group, "sharding_strategy": strategy}
    strategy = ShardingStrategy.HYBRID_SHARD if reshard else ShardingStrategy._HYBRID_SHARD_ZERO2
    return {
        "process_group": (rank_mesh.shard_group, rank_mesh.shard_mesh.get_group("replicate")),
        "sharding_strategy": strategy,
    }


def _forward_through_root(model: nn.Module, root: nn.Module) -> None:
    """Make `model(...)` all-gather the root's parameters as a call of `root` does."""
    forward = model.forward

    @functools.wraps(forward)
    def forward_through_root(*args: Any, **kwargs: Any) -> Any:
        return root(functools.partial(forward, *args, **kwargs))

    model.forward = forward_through_root
