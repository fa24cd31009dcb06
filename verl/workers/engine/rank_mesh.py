"""Which ranks shard the parameters, and which ranks see the same data."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl.config import FSDPEngineConfig
from verl.runtime.group import RankPlace
from verl.utils.errors import ConfigError


@dataclass(frozen=True)
class RankMesh:
    """This rank's position among all. Consecutive ranks split sequences; consecutive ranks shard parameters."""

    rank: int = 0
    world_size: int = 1
    sequence_size: int = 1  # ranks that split the tokens of a sequence (Ulysses)
    shard_mesh: DeviceMesh | None = None  # ("shard",), or ("replicate", "shard"); None: not sharded
    data_group: dist.ProcessGroup | None = None  # the ranks that see different data, this one included
    sequence_group: dist.ProcessGroup | None = None  # the ranks that see the same data

    @classmethod
    def of(cls, config: FSDPEngineConfig, device: torch.device) -> "RankMesh":
        """The mesh of the ranks of `torch.distributed`; one rank if it is not initialised. A collective."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        sequence = _check_divides(config.ulysses_sequence_parallel_size, world, "ulysses_sequence_parallel_size")
        if world == 1:
            return cls()
        shards = _check_divides(world if config.fsdp_size < 1 else min(config.fsdp_size, world), world, "fsdp_size")
        kind = device.type
        if shards == world:
            mesh = init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh(kind, (world // shards, shards), mesh_dim_names=("replicate", "shard"))
        data_group, sequence_group = dist.group.WORLD, None
        if sequence > 1:
            grid = init_device_mesh(kind, (world // sequence, sequence), mesh_dim_names=("data", "sequence"))
            data_group = grid.get_group("data")
            # a separate group, even over all ranks: its collectives must not queue behind parameter all-gathers
            groups = [dist.new_group(list(range(first, first + sequence))) for first in range(0, world, sequence)]
            sequence_group = groups[dist.get_rank() // sequence]
        return cls(dist.get_rank(), world, sequence, mesh, data_group, sequence_group)

    @property
    def data_size(self) -> int:
        """The number of shards of the data."""
        return self.world_size // self.sequence_size

    @property
    def data_rank(self) -> int:
        """Which shard of the data this rank sees."""
        return self.rank // self.sequence_size

    @property
    def place(self) -> RankPlace:
        """This rank's shard of the data; the first of the ranks that split its sequences returns the outputs."""
        return RankPlace(self.data_rank, self.rank % self.sequence_size == 0)

    @property
    def shard_size(self) -> int:
        """The number of ranks that shard one copy of the parameters."""
        return 1 if self.shard_mesh is None else self.shard_mesh.size(self.shard_mesh.ndim - 1)

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


def _all_reduce_scalar(value: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> float:
    dist.all_reduce(value, op, group)
    return value.item()


def _check_divides(size: int, world: int, name: str) -> int:
    if world % size:
        sizes = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(f"{name}={size} does not divide {world} ranks; use one of {', '.join(map(str, sizes))}")
    return size
