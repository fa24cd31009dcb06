"""Boundaries of packed sequences.

Shapes: N sequences, T packed tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Sequence boundaries, on the host for loops and on the device for kernels."""

    lengths: tuple[int, ...]
    cu_seqlens: Tensor  # (N+1,) int32, on the model's device
    boundaries: Tensor  # the same on the host: what a compiled layer takes in place of the lengths

    @classmethod
    def of(cls, cu_seqlens: "Packing | Tensor", device: torch.device) -> "Packing":
        if isinstance(cu_seqlens, Packing):
            return cu_seqlens
        boundaries = cu_seqlens.to("cpu", torch.int64)
        return cls(tuple(boundaries.diff().tolist()), cu_seqlens.to(device=device, dtype=torch.int32), boundaries)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> "Packing":
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        return cls(tuple(lengths), boundaries.to(device, torch.int32), boundaries)

    def with_extra_sequence(self, length: int) -> "Packing":
        """The same sequences and one more of `length` tokens."""
        return Packing.of_lengths((*self.lengths, length), self.cu_seqlens.device)

    @property
    def max_length(self) -> int:
        return max(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def equal_length_runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(count, length) of consecutive sequences of equal length: each run is one batched call, without a copy."""
    return [(sum(1 for _ in group), length) for length, group in groupby(lengths)]
