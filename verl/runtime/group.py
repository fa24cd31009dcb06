"""Groups of workers, one worker per rank, called through `broadcast`, `scatter` and `post`."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any

ANSWER_S = 5.0  # how long a node's answer is waited for


@dataclass(frozen=True)
class RankPlace:
    """The data-parallel group of a rank, and whether `scatter` returns this rank's result as that of the group."""

    data_group: int = 0
    returns_outputs: bool = True


@dataclass(frozen=True)
class Layout:
    """The place of every rank. The ranks of one data-parallel group process the same data; one returns the outputs."""

    places: tuple[RankPlace, ...] = (RankPlace(),)

    def __post_init__(self) -> None:
        groups = sorted(place.data_group for place in self.places if place.returns_outputs)
        if groups != list(range(len(groups))) or {place.data_group for place in self.places} != set(groups):
            raise ValueError(
                f"data-parallel groups 0, 1, ... each need one rank that returns outputs, got {self.places}"
            )

    @classmethod
    def data_parallel(cls, dp: int, ranks_per_group: int = 1) -> "Layout":
        """`dp` groups of `ranks_per_group` consecutive ranks; the first of each returns the outputs."""
        return cls(
            tuple(
                RankPlace(rank // ranks_per_group, rank % ranks_per_group == 0) for rank in range(dp * ranks_per_group)
            )
        )

    @property
    def world_size(self) -> int:
        return len(self.places)

    @cached_property
    def output_ranks(self) -> tuple[int, ...]:
        """The rank that returns the outputs of each data-parallel group."""
        ranks = [rank for rank, place in enumerate(self.places) if place.returns_outputs]
        return tuple(sorted(ranks, key=lambda rank: self.places[rank].data_group))

    @property
    def dp(self) -> int:
        return len(self.output_ranks)


class ObjectOnNode(ABC):
    """An object of the driver that lives in a process of its own on a machine of the ranks."""

    @abstractmethod
    def call(self, method: str, *args: Any, limit_s: float = ANSWER_S) -> Any:
        """The result of `method(*args)`, also beside other calls; TimeoutError after `limit_s`, the VerlError that it
        raised, and VerlError where it failed otherwise or is lost."""

    @abstractmethod
    def end(self) -> None:
        """End its process."""


class WorkerGroup(ABC):
    """The workers of all ranks. All ranks receive calls in the same order, also those of concurrent threads.

    A coroutine method runs beside other calls of its rank; its result is that of the coroutine. A failure on another
    process is `WorkerError(rank, method, remote traceback)`; on this one it is the exception itself.
    """

    layout: Layout

    @property
    def local_worker(self) -> Any | None:
        """The worker of this process; None where all workers run in other processes."""
        return None

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call `method(*args)` on every rank; results in rank order."""
        return self.call(method, [args] * self.layout.world_size)

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        """Call `method(shards[i], *args)` on every rank of data-parallel group i; one result per group."""
        if len(shards) != self.layout.dp:
            raise ValueError(f"{self.layout.dp} data-parallel groups take one shard each, got {len(shards)}")
        by_group = [(shard, *args) for shard in shards]
        results = self.call(method, [by_group[place.data_group] for place in self.layout.places])
        return [results[rank] for rank in self.layout.output_ranks]

    @abstractmethod
    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method(*arguments[rank])` on every rank, and wait; results in rank order. `method` may have dots."""

    @abstractmethod
    def post(self, rank: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future]:
        """Start one call of `method` on `rank` per tuple; coroutines of one post start together."""

    def hold(
        self,
        factory: Callable[[str, list[str]], Any],
        node: int,
        ranks: Sequence[int] = (),
        num_devices: int = 0,
        for_all: bool = False,
    ) -> ObjectOnNode:
        """Builds `factory(address, devices)` on machine `node` of a cluster, where the driver, with `for_all`
        every machine, reaches it at `address`: for the devices of `ranks`, or for `num_devices` of its own."""
        raise NotImplementedError("only a cluster's ranks have machines")

    @property
    def address(self) -> str:
        """The address of rank 0's machine, as the others reach it."""
        raise NotImplementedError("only a cluster's ranks have machines")

    @abstractmethod
    def close(self) -> None:
        """End the workers. The group cannot be used afterwards."""

    def for_role(self, name: str) -> "WorkerGroup":
        """Calls attribute `name` of the same workers, in the layout that this attribute's `place()` gives."""
        return _RoleGroup(self, name)


class _RoleGroup(WorkerGroup):
    def __init__(self, base: WorkerGroup, name: str):
        self.base, self.name = base, name
        self.layout = Layout(tuple(base.broadcast(f"{name}.place")))

    @property
    def local_worker(self) -> Any | None:
        worker = self.base.local_worker
        return None if worker is None else getattr(worker, self.name)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.base.call(f"{self.name}.{method}", arguments)

    def post(self, rank: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future]:
        return self.base.post(rank, f"{self.name}.{method}", arguments)

    def hold(
        self,
        factory: Callable[[str, list[str]], Any],
        node: int,
        ranks: Sequence[int] = (),
        num_devices: int = 0,
        for_all: bool = False,
    ) -> ObjectOnNode:
        return self.base.hold(factory, node, ranks, num_devices, for_all)

    @property
    def address(self) -> str:
        return self.base.address

    def close(self) -> None:
        """Does nothing: the owner of `base` closes it."""
