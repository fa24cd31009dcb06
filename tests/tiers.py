"""What CI leaves to `make soak PART=tests`: the repetitions of a test with further values."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def soak(values: Iterable[Any]) -> list[Any]:
    """Parameters with which the test runs in the soak only."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


def slow(values: Iterable[Any]) -> list[Any]:
    """Parameters with which the test runs in `make test-slow` only."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """Parameters of a test that takes a value of each axis: CI runs each value once, the soak all combinations."""
    numbers = range(max(map(len, axes)))
    in_ci = {tuple((number + number // len(axis)) % len(axis) for axis in axes) for number in numbers}
    return [
        pytest.param(
            *(axis[place] for axis, place in zip(axes, places, strict=True)),
            marks=() if places in in_ci else pytest.mark.soak,
        )
        for places in itertools.product(*(range(len(axis)) for axis in axes))
    ]
