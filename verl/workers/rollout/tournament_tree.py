"""The least loaded of many replicas, in a time that grows with the logarithm of their number."""

import math


class LeastLoaded:
    """Loads of replicas 0 to count - 1. Each change costs log2(count) comparisons, `least` none (a tournament tree)."""

    def __init__(self, count: int):
        self._leaves = 1 << (count - 1).bit_length()  # a power of two; leaf i of the tree is node _leaves + i
        self._loads = [0.0] * count + [math.inf] * (self._leaves - count)
        self._winners = [0] * self._leaves + list(range(self._leaves))  # of each node; node 1 is the root
        for node in reversed(range(1, self._leaves)):
            self._play(node)

    @property
    def least(self) -> int:
        """The replica with the smallest load; of equal ones the first."""
        return self._winners[1]

    def __getitem__(self, replica: int) -> float:
        return self._loads[replica]

    def __setitem__(self, replica: int, load: float) -> None:
        self._loads[replica] = load
        node = (self._leaves + replica) >> 1
        while node:
            self._play(node)
            node >>= 1

    def _play(self, node: int) -> None:
        left, right = self._winners[2 * node], self._winners[2 * node + 1]
        self._winners[node] = left if self._loads[left] <= self._loads[right] else right
