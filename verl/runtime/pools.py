"""Pools of devices: which roles live on which, and one group of workers for each pool, a rank on each device."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from verl.runtime.group import WorkerGroup


@dataclass(frozen=True)
class Pool:
    """`per_node` devices on each of `nodes` machines, from `first_device` of node `first_node` on, for `roles`.

    Pools share no device.
    """

    name: str
    roles: tuple[str, ...]
    per_node: int = 1
    nodes: int = 1
    first_device: int = 0
    first_node: int = 0

    @property
    def num_devices(self) -> int:
        return self.nodes * self.per_node


def describe_pools(pools: Iterable[Pool]) -> str:
    """The number of ranks in words, by pool if there are several."""
    sizes = {pool.name: pool.num_devices for pool in pools}
    total = sum(sizes.values())
    by_pool = f" ({', '.join(f'{name} {size}' for name, size in sizes.items())})" if len(sizes) > 1 else ""
    return f"{total} rank{'s' if total > 1 else ''}{by_pool}"


class WorkerPools:
    """The worker group of every pool. Collectives are among the ranks of one pool."""

    def __init__(
        self,
        pools: Iterable[Pool],
        start: Callable[[Pool], WorkerGroup],
        after_close: Callable[[], None] = lambda: None,
    ):
        """Start the pools in order; if one fails, those that run are closed. `after_close` is called at the end."""
        self.after_close = after_close
        self.groups: dict[Pool, WorkerGroup] = {}
        try:
            for pool in pools:
                self.groups[pool] = start(pool)
        except BaseException:
            self.close()
            raise

    @property
    def num_ranks(self) -> int:
        """The ranks of all pools."""
        return sum(group.layout.world_size for group in self.groups.values())

    def group_of(self, role: str) -> WorkerGroup:
        """The whole workers of the ranks that hold `role`."""
        return next(group for pool, group in self.groups.items() if role in pool.roles)

    def for_role(self, role: str) -> WorkerGroup:
        """The workers of `role`, in the layout that its engine gives."""
        return self.group_of(role).for_role(role)

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call `method(*args)` on every rank of every pool, one pool after the other."""
        return [result for group in self.groups.values() for result in group.broadcast(method, *args)]

    def close(self) -> None:
        """End all workers."""
        with ExitStack() as ending:  # each also where another fails
            ending.callback(self.after_close)
            for group in self.groups.values():
                ending.callback(group.close)
