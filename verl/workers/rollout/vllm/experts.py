"""Joined experts in vLLM: where they hold a checkpoint's tensors, and how to read them back from the CPU's kernel.

The kernel keeps both matrices of each expert in a packed form, which only moves values: packing the numbers 0, 1, 2, …
shows where each value goes. Experts of other kernels are not read back; the probe checks them.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

from verl.plugin.library_versions import vllm_cpu_experts

CPU_EXPERTS = vllm_cpu_experts()

Index = tuple[slice | int, ...]


class Place(NamedTuple):
    """`sent` of a checkpoint's tensor is `local` of a parameter on this rank."""

    sent: Index
    local: Index


class ExpertLocation(NamedTuple):
    """The layer and parameter that hold a tensor of an expert, and which parts of it."""

    layer: str
    parameter: str
    places: list[Place]


def packed_experts(module: nn.Module | None) -> Any:
    """The CPU kernel of a layer of joined experts whose packing is known; None for any other module."""
    if CPU_EXPERTS is None or not isinstance(module, RoutedExperts):
        return None
    kernel = getattr(getattr(module.quant_method, "moe_kernel", None), "fused_experts", None)
    known = isinstance(kernel, CPU_EXPERTS.kernel) and not CPU_EXPERTS.packs_otherwise(module)
    return kernel if known else None


def repack_experts(model: nn.Module) -> None:
    """Pack the experts that a reload has left as they were loaded: vLLM packs them at its first load only."""
    for module in model.modules():
        if kernel := packed_experts(module):
            kernel.process_weights_after_loading(module)


def find_expert(modules: dict[str, nn.Module], name: str) -> ExpertLocation:
    """Where this rank holds tensor `name` of the checkpoint.

    Names are those of joined tensors (`experts.gate_up_proj`, `experts.down_proj`) or of one expert
    (`experts.3.up_proj.weight`). No places where the layout is not known.
    """
    parent, found, rest = name.rpartition(".experts.")
    path = f"{parent}.experts.routed_experts"
    module: Any = modules.get(path)
    kernel, (number, _, leaf) = packed_experts(module), rest.removesuffix(".weight").rpartition(".")
    config = getattr(module, "moe_config", None)
    if not found or kernel is None or config.moe_parallel_config.use_ep or module.is_fused_checkpoint_transposed:
        return ExpertLocation(path, "", [])
    if leaf not in ("gate_proj", "up_proj", "gate_up_proj", "down_proj") or not (number.isdecimal() or not number):
        return ExpertLocation(path, "", [])
    size, rank = config.intermediate_size_per_partition, config.moe_parallel_config.tp_rank
    count = config.moe_parallel_config.tp_size
    expert: Index = (int(number),) if number else (slice(None),)
    sent: Index = () if number else (slice(None),)
    own = slice(rank * size, (rank + 1) * size)
    if leaf == "down_proj":
        return ExpertLocation(path, "w2_weight", [Place((*sent, slice(None), own), expert)])
    halves = {"gate_proj": [0], "up_proj": [1], "gate_up_proj": [0, 1]}[leaf]
    joined = leaf == "gate_up_proj"
    return ExpertLocation(path, "w13_weight", [
        Place((*sent, slice(own.start + half * size * count * joined, own.stop + half * size * count * joined)),
              (*expert, slice(half * size, (half + 1) * size)))
        for half in halves
    ])  # fmt: skip


def unpacked(module: Any, parameter: str) -> Tensor:
    """(experts, rows, columns): `w13_weight` or `w2_weight` of a packed layer as it was loaded."""
    packed, kernel = module._parameters[parameter].detach(), packed_experts(module)
    assert kernel is not None, "find_expert names packed layers only"
    order = packing_order(*packed.shape[1:], packed.dtype, kernel.isa)
    plain = torch.empty_like(packed)
    plain.view(len(packed), -1)[:, order] = packed.view(len(packed), -1)
    return plain


@functools.cache
def packing_order(rows: int, columns: int, dtype: torch.dtype, isa: str) -> Tensor:
    """(rows * columns,) int64: the place in a plain expert of each value of the packed one."""
    places, words = torch.arange(rows * columns), torch.int32 if dtype.itemsize == 4 else torch.int16
    assert CPU_EXPERTS is not None, "find_expert names packed layers only"
    order, bits = torch.zeros_like(places), 8 * dtype.itemsize
    for shift in range(0, int(places[-1]).bit_length(), bits):
        part = ((places >> shift) & ((1 << bits) - 1)).to(words).view(dtype).view(1, rows, columns)
        moved = CPU_EXPERTS.pack(part, isa).view(words).flatten().long() & ((1 << bits) - 1)
        order |= moved << shift
    assert torch.equal(order.sort().values, places), f"packing for {isa} does not only move values"
    return order
