"""Expert parallelism: ranks divide the experts of every layer, and each token travels to the ranks of its experts.

Every rank of a group routes its own tokens. An all-to-all brings each pair (token, expert) to the rank of the expert,
and another one brings the result back. So the gradient of an expert has the tokens of all ranks of the group.

Shapes: T tokens of this rank, k experts a token, D hidden, E experts, S ranks, R pairs for the E / S experts of a rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from verl.config.mesh import MeshShape
from verl.models.attention.ulysses import check_peers, has_stopped
from verl.utils.errors import ConfigError

EXPERT_PARALLEL = "verl_expert_parallel"
KEY = "expert_parallel_size"
_TRAITS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")  # which the library's decorator sets


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The modules that hold the experts of a layer, in the order of the layers."""
    return [module for module in model.modules() if all(hasattr(module, name) for name in _TRAITS)]


def are_divided(model: nn.Module) -> bool:
    """Whether ranks divide the experts of `model`."""
    return any(hasattr(experts, "expert_group") for experts in experts_of(model))


def check_experts(model: nn.Module, shape: MeshShape) -> None:
    """ConfigError where `shape.experts` ranks cannot divide the experts, and the other ranks what each expert holds."""
    found = experts_of(model)
    if not found:
        raise ConfigError(
            f"{KEY}={shape.experts}, but {type(model).__name__} has no layers of experts that ranks can divide; set "
            f"{KEY}=1"
        )
    rest = shape.sharded // shape.experts
    for experts in found:
        count = int(experts.num_experts)
        sizes = {p.shape[1] for p in experts.parameters(recurse=False)}
        allowed = [n for n in range(1, shape.sharded + 1) if shape.sharded % n == 0 == count % n]
        fits = [n for n in allowed if not any(size % (shape.sharded // n) for size in sizes)]
        if shape.experts not in allowed:
            raise ConfigError(f"{KEY}={shape.experts} does not divide {count} experts; {_use(fits)}")
        if shape.experts not in fits:
            raise ConfigError(
                f"{KEY}={shape.experts} leaves {rest} ranks to shard each expert, which do not divide its sizes "
                f"{', '.join(map(str, sorted(sizes)))}; {_use(fits)}, or another fsdp_size"
            )


def _use(sizes: list[int]) -> str:
    return f"use one of {', '.join(map(str, sizes))}" if sizes else "use another number of ranks"


def divide_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Keep the experts of this rank of the one-dimensional `mesh`, on the meta device; the modules that hold them."""
    model.set_experts_implementation(EXPERT_PARALLEL)
    found = experts_of(model)
    for experts in found:
        experts.expert_group = mesh.get_group()
        for name, parameter in list(experts.named_parameters(recurse=False)):
            local = torch.empty_like(parameter.chunk(mesh.size())[0], device="meta")
            divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            experts.register_parameter(name, nn.Parameter(divided, parameter.requires_grad))
    return found


def run_divided(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """(T, D), (T, k), (T, k) -> (T, D): the weighted sum of the experts of each token, in the library's interface."""
    group, num_tokens = self.expert_group, len(hidden_states)
    if has_stopped(group):
        return _run_here(self, hidden_states, top_k_weights)
    size, here = group.size(), self.num_experts // group.size()
    experts_of_pairs, order = top_k_index.reshape(-1).sort(stable=True)
    bounds = torch.arange(self.num_experts + 1, device=order.device)
    counts = torch.searchsorted(experts_of_pairs, bounds).diff()  # (E,)
    coming = torch.empty_like(counts)
    check_peers(group)
    dist.all_to_all_single(coming, counts, group=group)
    given, taken = (c.view(size, here).sum(1).tolist() for c in (counts, coming))
    pairs = _Exchange.apply(hidden_states[order // top_k_index.shape[1]], taken, given, group)  # (R, D)
    numbers = torch.arange(here, device=order.device).repeat(size).repeat_interleave(coming)
    by_expert = numbers.argsort(stable=True)
    computed = _run_experts(self, pairs[by_expert], coming.view(size, here).sum(0))
    returned = _Exchange.apply(computed[by_expert.argsort()], given, taken, group)
    outputs = returned[order.argsort()].view(num_tokens, -1, returned.shape[-1])
    return (outputs * top_k_weights.unsqueeze(-1)).sum(1).to(hidden_states.dtype)


def _run_here(experts: Any, hidden_states: Tensor, top_k_weights: Tensor) -> Tensor:
    """Stands for `run_divided` in a pass whose results nobody uses, without its exchanges: an expert of this rank."""
    here = experts.num_experts // experts.expert_group.size()
    counts = torch.tensor([len(hidden_states)] + [0] * (here - 1), device=hidden_states.device)
    computed = _run_experts(experts, hidden_states, counts)
    return (computed * top_k_weights.sum(1, keepdim=True)).to(hidden_states.dtype)


def _run_experts(experts: Any, rows: Tensor, counts: Tensor) -> Tensor:
    """(R, D) rows, sorted by the experts of this rank, of which each has `counts` -> (R, D)."""
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    hidden = _linear(experts, first, rows, counts)
    hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
    return _linear(experts, "down_proj", hidden, counts)


def _linear(experts: Any, name: str, rows: Tensor, counts: Tensor) -> Tensor:
    """Each expert's matrix `name`, and its bias, on the rows of the expert."""
    weight = _local(getattr(experts, name))
    weight = weight if experts.is_transposed else weight.transpose(1, 2)  # (E / S, in, out)
    if rows.device.type != "cpu" and weight.dtype == torch.bfloat16:
        out = torch.nn.functional.grouped_mm(rows.to(weight.dtype), weight, offs=counts.cumsum(0).int())
    else:
        parts = rows.to(weight.dtype).split(counts.tolist())
        out = torch.cat([part @ matrix for part, matrix in zip(parts, weight.unbind(), strict=True)])
    return out + _local(getattr(experts, f"{name}_bias")).repeat_interleave(counts, 0) if experts.has_bias else out


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class _Exchange(torch.autograd.Function):
    """Row blocks of sizes `given` go to the ranks; blocks of sizes `taken` come from them. Backward goes back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, taken: list[int], given: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = taken, given, group
        received = rows.new_empty(sum(taken), *rows.shape[1:])
        rows = rows.contiguous()
        check_peers(group)
        dist.all_to_all_single(received, rows, taken, given, group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        taken, given, group = ctx.sizes
        return _Exchange.apply(gradient, given, taken, group), None, None, None


def parameter_meshes(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """The parameters by the mesh that shards them: kernels over many of them take one mesh only."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    yield from groups.values()


ALL_EXPERTS_FUNCTIONS.register(EXPERT_PARALLEL, run_divided)
