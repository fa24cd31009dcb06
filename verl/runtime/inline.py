"""A group of one worker in this process, called directly."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from verl.runtime.group import Layout, WorkerGroup


class InlineGroup(WorkerGroup):
    """A group of one rank. Errors are raised unchanged, with their own traceback."""

    def __init__(self, worker: Any):
        self.worker, self.layout = worker, Layout()

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        return [attrgetter(method)(self.worker)(*args)]

    def scatter(self, method: str, shards: Sequence[Any], *args: Any) -> list[Any]:
        if len(shards) != 1:
            raise ValueError(f"one rank takes one shard, got {len(shards)}")
        return [attrgetter(method)(self.worker)(shards[0], *args)]

    def close(self) -> None:
        """Does nothing."""
