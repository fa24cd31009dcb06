"""Collectives of Python objects between ranks that run the same program (under torchrun)."""

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Collectives:
    """Collectives over all ranks of the job: all ranks call the methods in the same order."""

    def __init__(self, rank: int = 0, world_size: int = 1):
        self.rank, self.world_size = rank, world_size

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that writes logs and files."""
        return self.rank == 0

    def all_gather(self, value: T) -> list[T]:
        """Every rank's `value`, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values
