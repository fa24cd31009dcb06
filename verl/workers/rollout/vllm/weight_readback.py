"""Reads weights back from the layers of vLLM that compute with them, in the names and layout of the checkpoint.

The layout is derived from what a layer computes (the order and sizes of fused projections, the rows or columns of a
tensor-parallel rank), not from vLLM's weight loaders, which could be wrong. A matrix that a kernel keeps in its own
packed form is multiplied by unit vectors: every output is then one weight plus zeros, so it is exact in any dtype. That
takes longer than the update itself, so later updates read a 64th of such a matrix, each another one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from verl.models.fingerprint import fingerprint
from verl.workers.rollout.base import ReadBack
from verl.workers.rollout.vllm.experts import Index, Place, find_expert, packed_experts, unpacked

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
UNIT_VECTORS = 512  # at a time: bounds the memory of their outputs
SHARES = 64  # of the columns of a packed matrix: one at each update after the first, in turn


@dataclass(frozen=True, eq=False)
class WeightPart:
    """`sent` of a checkpoint's tensor is `local` of a layer's parameter on this rank."""

    path: str  # of the layer in vLLM's model
    parameter: str
    dtype: torch.dtype
    sent: Index
    local: Index
    packed: bool  # only the kernel's own form is left: read it by multiplication

    def expected(self, tensor: Tensor, columns: slice | None) -> str | Tensor:
        """The layer's content once `tensor` is loaded: its fingerprint, or a copy of these columns."""
        if columns is None:
            return self.fingerprint(tensor[self.sent].to(self.dtype))
        return tensor[self.sent][:, columns].to(self.dtype, copy=True)

    def found(self, parameter: Tensor) -> Tensor:
        """This part of `parameter` as read back."""
        return parameter[self.local].to(self.dtype)

    def fingerprint(self, tensor: Tensor) -> str:
        """Equal for what is equal to a kernel."""
        if self.packed:  # sums lose the sign of zero, and some units flush what is almost zero
            tensor = torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, torch.zeros_like(tensor), tensor)
        return fingerprint(tensor)

    @property
    def is_plain(self) -> bool:
        """Whether the layer holds the tensor as it was sent, if it also has that dtype."""
        return not self.packed and self.sent == (slice(None),)


@dataclass
class WeightReader:
    """Compares what arrives for `model` with what its layers hold afterwards. Built before the first reload."""

    model: nn.Module
    parts: dict[str, list[WeightPart]] = field(default_factory=dict)  # by name of the checkpoint's tensor
    expected: dict[tuple[str, WeightPart], str | Tensor] = field(default_factory=dict)
    num_updates: int = 0  # that were read back

    def __post_init__(self) -> None:
        self.modules = dict(self.model.named_modules())
        self.kernel_shapes = {f"{path}.{name}": p.shape for path, name, p in self._parameters()}
        self.loaders = {f"{path}.{name}": getattr(p, "weight_loader", None) for path, name, p in self._parameters()}
        mapper = getattr(self.model, "hf_to_vllm_mapper", None)
        self.rename = (lambda name: name) if mapper is None else mapper.get_rename_mapper().map_name
        self.fused = FUSED | dict(getattr(self.model, "packed_modules_mapping", None) or {})
        self.tied = {
            path: [other for other, m in self._embeddings() if other != path and m.weight is module.weight]
            for path, module in self._embeddings()
        }

    def _embeddings(self) -> Iterator[tuple[str, Any]]:
        return ((path, m) for path, m in self.modules.items() if isinstance(m, VocabParallelEmbedding))

    def _parameters(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        for path, module in self.modules.items():
            yield from ((path, name, p) for name, p in module._parameters.items() if p is not None)

    def record_expected(self, name: str, tensor: Tensor, arrived: str) -> None:
        """Note what the layers must hold of a tensor that arrived with the fingerprint `arrived`."""
        if name not in self.parts:
            self.parts[name] = self.locate(name)
        for part in self.parts[name]:
            same = part.is_plain and part.dtype == tensor.dtype
            columns = self.columns_to_read(self.modules[part.path]) if part.packed and self.num_updates else None
            self.expected[name, part] = arrived if same else part.expected(tensor, columns)

    def columns_to_read(self, module: Any) -> slice:
        """Columns of a packed matrix to read back now: all at the first publish, then a rotating share."""
        count = num_columns(module)
        if self.num_updates == 0:
            return slice(0, count)
        size = -(-count // SHARES)
        start = (self.num_updates - 1) * size % (size * -(-count // size))
        return slice(start, min(start + size, count))

    @torch.no_grad()
    def compare_and_reset(self) -> ReadBack:
        """Reads every layer back; forgets what was recorded."""
        by_parameter: dict[tuple[str, str, bool], list[tuple[str, WeightPart]]] = {}
        for name, part in self.expected:
            by_parameter.setdefault((part.path, part.parameter, part.packed), []).append((name, part))
        wrong, read, missing = [], set(), []
        for (path, parameter, packed), parts in by_parameter.items():
            module = self.modules[path]
            if packed_experts(module):
                value = unpacked(module, parameter)
            elif packed:
                value = columns_from_kernel(module, self.columns_to_read(module))
            else:
                value = getattr(module, parameter).detach()
            missing += missing_rows(f"{path}.{parameter}", module, [part for _, part in parts], value)
            for name, part in parts:
                found, wanted = part.found(value), self.expected[name, part]
                if isinstance(wanted, Tensor):
                    if torch.equal(found, wanted):
                        continue
                    wanted = part.fingerprint(wanted)
                if (held := part.fingerprint(found)) != wanted:
                    wrong.append((name, path, wanted, held))
            read.add(f"{path}.{parameter}")
        names = {name for name, _ in self.expected}
        aliases = {f"{other}.weight" for path in self.tied if f"{path}.weight" in read for other in self.tied[path]}
        unread = [f"{path}.{n}" for path, n, _ in self._parameters() if f"{path}.{n}" not in read | aliases]
        self.expected, self.num_updates = {}, self.num_updates + 1
        return ReadBack(len(names), tuple(wrong), tuple(missing), tuple(unread))

    def locate(self, name: str) -> list[WeightPart]:
        """Where the layers hold a tensor of the checkpoint; empty if its layout is not known."""
        name = self.rename(name) or name
        if ".experts." in name:
            path, parameter, found = find_expert(self.modules, name)
            return [WeightPart(path, parameter, self._dtype(path, parameter), *place, False) for place in found]
        path, _, parameter = name.rpartition(".")
        shard = None
        if path not in self.modules:
            parent, _, leaf = path.rpartition(".")
            for fused, leaves in self.fused.items():
                if leaf in leaves and f"{parent}.{fused}" in self.modules:
                    path, shard = f"{parent}.{fused}", leaves.index(leaf)
        module = self.modules.get(path)
        local = None if module is None else module._parameters.get(parameter)
        if local is None or not self._loads_unchanged(path, module, parameter):
            return []
        if not isinstance(module, LinearBase) and not self._keeps_shape(path, parameter, local):
            return []
        parts = [self._part(path, parameter, local, *place) for place in places(module, parameter, shard)]
        if isinstance(module, VocabParallelEmbedding) and parameter == "weight":
            heads = [other for other in self.tied[path] if isinstance(self.modules[other], ParallelLMHead)]
            if not heads and self.tied_to_itself(path):
                heads = [path]
            for head in heads:
                parts += [self._part(head, parameter, local, *place, head=True) for place in places(module, parameter)]
        return parts

    def tied_to_itself(self, path: str) -> bool:
        """Whether the embedding `path` is also the head, without a module of its own."""
        has_head = any(isinstance(module, ParallelLMHead) for _, module in self._embeddings())
        return not has_head and len(list(self._embeddings())) == 1 and hasattr(self.modules[path], "cpu_linear")

    def _part(
        self, path: str, parameter: str, local: Tensor, sent: Index, rows: Index, head: bool = False
    ) -> WeightPart:
        module = self.modules[path]
        multiplies = head or isinstance(module, LinearBase | ParallelLMHead)
        packed = multiplies and (hasattr(module, "cpu_linear") or not self._keeps_shape(path, parameter, local))
        packed = packed and parameter == "weight"
        return WeightPart(path, parameter, local.dtype, sent, rows, packed)

    def _dtype(self, path: str, parameter: str) -> torch.dtype:
        loading = self.modules[path]._parameters[parameter]
        assert loading is not None, "a layer of experts has both matrices"
        return loading.dtype

    def _keeps_shape(self, path: str, parameter: str, loading: Tensor) -> bool:
        """Whether the kernel's parameter has the shape that is loaded."""
        return self.kernel_shapes[f"{path}.{parameter}"] == loading.shape

    def _loads_unchanged(self, path: str, module: nn.Module, parameter: str) -> bool:
        """Whether loading copies values as they are: not through a loader of the model or of a quantization."""
        quantization = getattr(module, "quant_method", None)
        if quantization is not None and not type(quantization).__name__.startswith("Unquantized"):
            return False
        if isinstance(module, LinearBase | VocabParallelEmbedding):
            return type(module).__module__.startswith("vllm.model_executor.layers.")
        loader = self.loaders.get(f"{path}.{parameter}")
        return loader is None or getattr(loader, "__name__", "") == "default_weight_loader"


def places(module: Any, parameter: str, shard: int | None = None) -> list[Place]:
    """This rank's part of a parameter of a layer; with `shard`, of that projection of a fused layer."""
    if isinstance(module, VocabParallelEmbedding):
        shard_of = module.shard_indices
        count = shard_of.org_vocab_end_index - shard_of.org_vocab_start_index
        return [Place((slice(shard_of.org_vocab_start_index, shard_of.org_vocab_end_index),), (slice(0, count),))]
    if isinstance(module, RowParallelLinear) and parameter == "weight" and module.tp_size > 1:
        width = module.input_size_per_partition
        columns = slice(module.tp_rank * width, (module.tp_rank + 1) * width)
        return [Place((slice(None), columns), (slice(None),))]
    sizes = projection_shards(module)
    if not sizes or (len(sizes) == 1 and module.tp_size == 1):
        return [Place((slice(None),), (slice(None),))]
    found, global_start, local_start = [], 0, 0
    for number, (size, rank, count) in enumerate(sizes):
        if shard in (None, number):
            start = rank * size + (global_start if shard is None else 0)
            found.append(Place((slice(start, start + size),), (slice(local_start, local_start + size),)))
        global_start, local_start = global_start + size * count, local_start + size
    return found


class ProjectionShard(NamedTuple):
    """This rank's rows of one projection of a fused layer; ranks that hold replicas have one number."""

    rows: int
    number: int  # of this rank among those that differ
    count: int  # ranks that differ


def projection_shards(module: Any) -> list[ProjectionShard]:
    """The shard of each projection of a fused layer; of a plain one, of its only one."""
    if isinstance(module, QKVParallelLinear):
        replicas = module.num_kv_head_replicas
        kv_rank, kv_ranks = module.tp_rank // replicas, module.tp_size // replicas
        return [
            ProjectionShard(module.num_heads * module.head_size, module.tp_rank, module.tp_size),
            ProjectionShard(module.num_kv_heads * module.head_size, kv_rank, kv_ranks),
            ProjectionShard(module.num_kv_heads * module.v_head_size, kv_rank, kv_ranks),
        ]
    if isinstance(module, MergedColumnParallelLinear):
        return [ProjectionShard(size // module.tp_size, module.tp_rank, module.tp_size) for size in module.output_sizes]
    if isinstance(module, ColumnParallelLinear):
        return [ProjectionShard(module.output_size_per_partition, module.tp_rank, module.tp_size)]
    return []


def missing_rows(name: str, module: nn.Module, parts: list[WeightPart], value: Tensor) -> list[str]:
    """`name` if some projections of a fused layer received nothing."""
    if not isinstance(module, QKVParallelLinear | MergedColumnParallelLinear) and not packed_experts(module):
        return []
    num_rows = value.numel() // value.shape[-1] if value.dim() > 1 else len(value)
    covered = sum(value[part.local].numel() for part in parts) * num_rows // value.numel()
    return [] if covered == num_rows else [f"{num_rows - covered} of {num_rows} rows of {name}"]


def num_columns(module: Any) -> int:
    """Inputs of a linear layer or head, on this rank."""
    return int(
        getattr(module, "input_size_per_partition", None) or getattr(module, "input_size", None) or module.embedding_dim
    )


def columns_from_kernel(module: Any, columns: slice) -> Tensor:
    """(rows, columns): these columns of the matrix that the layer multiplies with, from its own kernel."""
    weight, found = module.weight, []
    for start in range(columns.start, columns.stop, UNIT_VECTORS):
        count = min(UNIT_VECTORS, columns.stop - start)
        vectors = torch.zeros(count, num_columns(module), dtype=weight.dtype, device=weight.device)
        vectors[:, start : start + count].fill_diagonal_(1)
        found.append(module.quant_method.apply(module, vectors).T)
    return torch.cat(found, dim=1)
