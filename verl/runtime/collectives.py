"""What ranks that all run the same program (under torchrun) tell each other."""

from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Collectives:
    """The ranks of the job, this one among them. Each method is a collective: all ranks call it, in the same order."""

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
