"""Metrics that merge exactly: sums with counts, maxima, minima and plain sums, however they were split."""

import math
from collections.abc import Mapping
from typing import Any, Self


class Metrics:
    """Named numbers collected in parts (micro-batches, mini-batches, ranks) and merged without loss.

    >>> m = Metrics(); m.mean("a", 6.0, 3); m.mean("a", 4.0, 2); m.values()
    {'a': 2.0}
    """

    def __init__(self, state: Mapping[str, Mapping[str, Any]] | None = None):
        state = state or {}
        self._means: dict[str, tuple[float, float]] = {n: (v[0], v[1]) for n, v in state.get("means", {}).items()}
        self._maxima: dict[str, float] = dict(state.get("maxima", {}))
        self._minima: dict[str, float] = dict(state.get("minima", {}))
        self._sums: dict[str, float] = dict(state.get("sums", {}))

    def mean(self, name: str, total: float, count: float) -> None:
        """Add `count` observations that sum to `total`."""
        old_total, old_count = self._means.get(name, (0.0, 0.0))
        self._means[name] = (old_total + float(total), old_count + float(count))

    def max(self, name: str, value: float) -> None:
        """Keep the largest value; a NaN is kept, so that it is visible."""
        old, new = self._maxima.get(name, float("-inf")), float(value)
        self._maxima[name] = new if new > old or math.isnan(new) else old

    def min(self, name: str, value: float) -> None:
        """Keep the smallest value; a NaN is kept, so that it is visible."""
        old, new = self._minima.get(name, float("inf")), float(value)
        self._minima[name] = new if new < old or math.isnan(new) else old

    def sum(self, name: str, value: float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(value)

    def merge(self, other: "Metrics") -> Self:
        """Add the metrics of `other`; returns self."""
        for name, (total, count) in other._means.items():
            self.mean(name, total, count)
        for name, value in other._maxima.items():
            self.max(name, value)
        for name, value in other._minima.items():
            self.min(name, value)
        for name, value in other._sums.items():
            self.sum(name, value)
        return self

    def with_prefix(self, prefix: str, unless: str | None = None) -> "Metrics":
        """The same metrics with `prefix` in front of every name that does not begin with `unless`."""

        def new(name: str) -> str:
            return name if unless and name.startswith(unless) else prefix + name

        state = {kind: {new(name): value for name, value in part.items()} for kind, part in self.state().items()}
        return Metrics(state)

    def values(self) -> dict[str, float]:
        """Every metric as a number; a mean of no observations is left out."""
        out = {name: total / count for name, (total, count) in self._means.items() if count > 0}
        return {**out, **self._maxima, **self._minima, **self._sums}

    def state(self) -> dict[str, dict]:
        """A JSON-serialisable form to send between processes; `Metrics(state)` restores it."""
        means = {n: list(v) for n, v in self._means.items()}
        return {"means": means, "maxima": dict(self._maxima), "minima": dict(self._minima), "sums": dict(self._sums)}
