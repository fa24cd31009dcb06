"""Which ranks shard the parameters, and which ranks see the same data."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.config import FSDPEngineConfig
from verl.config.mesh import MeshShape
from verl.models.attention.ulysses import stop_together
from verl.runtime.group import RankPlace


@dataclass(frozen=True)
class RankMesh:
    """This rank's position among all, whose shape is `shape`, and its groups."""

    rank: int = 0
    shape: MeshShape = field(default_factory=MeshShape)
    shard_mesh: DeviceMesh | None = None  # of a stage: ("shard",), or ("replicate", "shard"); None: not sharded
    expert_mesh: DeviceMesh | None = None  # the same ranks, the last dimension of which divides the experts
    data_group: dist.ProcessGroup | None = None  # the ranks of the stage that see different data, this one included
    sequence_group: dist.ProcessGroup | None = None  # the ranks of the stage that see the same data
    stop_group: dist.ProcessGroup | None = None  # those that wait for each other inside of a layer

    @classmethod
    def of(cls, config: FSDPEngineConfig, device: torch.device) -> "RankMesh":
        """The mesh of the ranks of `torch.distributed`; one rank if it is not initialised. A collective."""
        shape = config.mesh(dist.get_world_size() if dist.is_initialized() else 1)
        if shape.ranks == 1:
            return cls()
        rank, kind = dist.get_rank(), device.type
        copies, sharded, experts = shape.copies, shape.sharded, shape.experts
        data_group, sequence_group = dist.group.WORLD, None
        expert_mesh = _mesh(kind, copies, shard=sharded // experts, experts=experts) if experts > 1 else None
        if shape.sequence > 1:
            grid = init_device_mesh(kind, (shape.data, shape.sequence), mesh_dim_names=("data", "sequence"))
            data_group = grid.get_group("data")
            # a separate group, even over all ranks: its collectives must not queue behind parameter all-gathers
            sequence_group = _consecutive(shape.sequence, shape.ranks)
        stop_group = sequence_group
        if expert_mesh is not None:
            stop_group = _consecutive(math.lcm(shape.sequence, experts), shape.ranks)
            assert stop_group is not None
            for group in filter(None, (sequence_group, expert_mesh.get_group("experts"))):
                stop_together(group, stop_group)
        shard_mesh = _mesh(kind, copies, shard=sharded)
        return cls(rank, shape, shard_mesh, expert_mesh, data_group, sequence_group, stop_group)

    @property
    def expert_shard_mesh(self) -> DeviceMesh:
        """The ranks that have the same experts: those that shard them, or ("replicate", "shard")."""
        assert self.expert_mesh is not None, "all ranks have all experts"
        return self.expert_mesh["replicate", "shard"] if self.shape.copies > 1 else self.expert_mesh["shard"]

    @property
    def world_size(self) -> int:
        return self.shape.ranks

    @property
    def sequence_size(self) -> int:
        """The number of ranks that split the tokens of a sequence."""
        return self.shape.sequence

    @property
    def data_size(self) -> int:
        """The number of shards of the data."""
        return self.shape.data

    @property
    def data_rank(self) -> int:
        """Which shard of the data this rank sees."""
        return self.shape.data_group_of(self.rank)

    @property
    def place(self) -> RankPlace:
        """This rank's shard of the data, and whether it returns the outputs."""
        return RankPlace(self.data_rank, self.shape.returns_outputs(self.rank))

    @property
    def shard_size(self) -> int:
        """The number of ranks that shard one copy of the parameters."""
        return self.shape.sharded

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks that shard one copy of the parameters."""
        assert self.shard_mesh is not None, "one rank alone has no group"
        return self.shard_mesh.get_group(self.shard_mesh.ndim - 1)

    def max_over_ranks(self, number: int, device: torch.device) -> int:
        """The largest `number` of any rank."""
        if self.world_size == 1:
            return number
        return int(_all_reduce_scalar(torch.tensor(number, device=device), dist.ReduceOp.MAX))

    def min_over_ranks(self, number: int, device: torch.device) -> int:
        """The smallest `number` of any rank."""
        if self.world_size == 1:
            return number
        return int(_all_reduce_scalar(torch.tensor(number, device=device), dist.ReduceOp.MIN))

    def gather_texts(self, text: str) -> list[str]:
        """The `text` of every rank."""
        texts = [text] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(texts, text)
        return texts

    def norm_over_shards(self, local_norm: float, device: torch.device) -> float:
        """2-norm over all shards of one copy of the parameters; `local_norm` is the 2-norm of this rank's shard."""
        if self.shard_mesh is None:
            return local_norm
        square = torch.tensor(local_norm * local_norm, dtype=torch.float64, device=device)
        return math.sqrt(_all_reduce_scalar(square, dist.ReduceOp.SUM, self.shard_group))


def _consecutive(size: int, ranks: int) -> dist.ProcessGroup:
    """A new group of `size` consecutive ranks, this one among them. A collective."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks, size)]
    return groups[dist.get_rank() // size]


def _mesh(kind: str, copies: int, **sizes: int) -> DeviceMesh:
    """The mesh of all ranks with these dimensions, after `replicate` where there are several copies."""
    sizes = {"replicate": copies, **sizes} if copies > 1 else sizes
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _all_reduce_scalar(value: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> float:
    dist.all_reduce(value, op, group)
    return value.item()
