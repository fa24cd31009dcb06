"""Groups of workers, one worker per rank, called through `broadcast` and `scatter`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """`dp` data-parallel groups, each of `ranks_per_replica` ranks that process the same data."""

    dp: int = 1
    ranks_per_replica: int = 1

    @property
    def world_size(self) -> int:
        return self.dp * self.ranks_per_replica


class WorkerGroup(ABC):
    """The workers of all ranks. Calls are synchronous; a failure is `WorkerError(rank, method, remote traceback)`."""

    layout: Layout
    worker: Any  # only when it runs in this process

    @abstractmethod
    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call `method(*args)` on every rank; results in rank order."""

    @abstractmethod
    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Call `method(shards[i], *args)` on every rank of data-parallel group i; one result per group."""

    @abstractmethod
    def close(self) -> None:
        """End the workers. The group cannot be used afterwards."""

    def for_role(self, name: str, ranks_per_replica: int = 1) -> "WorkerGroup":
        """Calls attribute `name` of the same workers; every `ranks_per_replica` consecutive ranks get one shard."""
        return _RoleGroup(self, name, ranks_per_replica)


class _RoleGroup(WorkerGroup):
    def __init__(self, base: WorkerGroup, name: str, ranks_per_replica: int):
        self.base, self.name = base, name
        dp = max(base.layout.dp // ranks_per_replica, 1)
        self.layout = Layout(dp, base.layout.dp // dp)

    @property
    def worker(self) -> Any:
        return getattr(self.base.worker, self.name)

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        return self.base.broadcast(f"{self.name}.{method}", *args)

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        replica = self.layout.ranks_per_replica
        shard_per_rank = [shard for shard in shards for _ in range(replica)]
        return self.base.scatter(f"{self.name}.{method}", shard_per_rank, *args)[::replica]

    def close(self) -> None:
        """Does nothing: the owner of `base` closes it."""
