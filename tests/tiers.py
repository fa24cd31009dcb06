"""Tests that do not run everywhere: what CI leaves to `make soak PART=tests`, and pages of one pair of versions."""

import importlib.metadata
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from tests.conftest import ROOT


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


def of_pinned(package: str) -> pytest.MarkDecorator:
    """Skips a test of what docs/ says of `package`, written by the version in constraints.txt, with another version."""
    pin = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    version = importlib.metadata.version(package).split("+")[0]
    return pytest.mark.skipif(
        pin is None or pin[1] != version, reason=f"the page is of the {package} in constraints.txt"
    )
