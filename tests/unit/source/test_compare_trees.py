"""Ratios of two trees are those of pairs of runs."""

import pytest

from scripts.compare_trees import compare, spread


def test_a_ratio_is_the_median_over_pairs_and_its_spread_that_of_the_old_tree():
    old, new = ([{"step": value} for value in values] for values in ((1.0, 2.0, 4.0), (2.0, 3.0, 12.0)))
    found = compare(old, new)["step"]
    assert found["old"] == 2.0 and found["new"] == 3.0
    assert found["ratio"] == 2.0  # of 2.0, 1.5 and 3.0; the medians alone would say 1.5
    assert found["spread"] == pytest.approx(0.0)  # each run of the old tree takes twice the one before
    assert spread([1.0, 1.1, 1.2]) == pytest.approx(0.16)
