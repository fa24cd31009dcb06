"""Metrics: the split into parts cannot change the result."""

import json
import math

import pytest

from verl.data.metrics import Metrics

OBSERVATIONS = [4.0, -1.0, 2.5, 0.0, 7.0]


def collect(numbers):
    out = Metrics()
    for number in numbers:
        out.mean("mean", number, 1)
        out.max("max", number)
        out.min("min", number)
        out.sum("sum", number)
    return out


EXPECTED = {"mean": 2.5, "max": 7.0, "min": -1.0, "sum": 12.5}


@pytest.mark.parametrize("cut", range(6))
def test_merged_parts_equal_the_whole(cut):
    merged = collect(OBSERVATIONS[:cut]).merge(collect(OBSERVATIONS[cut:]))
    assert merged.values() == EXPECTED


def test_a_mean_is_weighted_by_count():
    metrics = Metrics()
    metrics.mean("a", 9.0, 9)
    metrics.mean("a", 3.0, 1)
    assert metrics.values() == {"a": 1.2}


def test_a_mean_of_nothing_is_left_out():
    metrics = Metrics()
    metrics.mean("a", 0.0, 0)
    assert metrics.values() == {}


def test_nan_is_kept_and_seen():
    metrics = collect([1.0, math.nan, 2.0])
    assert all(math.isnan(value) for value in metrics.values().values())


def test_a_prefix_is_put_before_every_name_of_a_copy():
    metrics = collect(OBSERVATIONS)
    assert metrics.with_prefix("actor/").values() == {"actor/" + k: v for k, v in EXPECTED.items()}
    assert metrics.values() == EXPECTED


def test_the_state_survives_json():
    state = json.loads(json.dumps(collect(OBSERVATIONS).state()))
    assert Metrics(state).merge(collect([20.0])).values()["max"] == 20.0
    assert Metrics(state).values() == EXPECTED
