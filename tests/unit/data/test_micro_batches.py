"""Micro-batches: every sequence once, nothing over the budget, no forward more than needed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching, bin_by_tokens, split_micro_batches
from verl.data.trajectory import Trajectory
from verl.utils.errors import ConfigError


def batch(lengths):
    return Batch.pack([Trajectory.from_completion([1], [2] * (n - 1), [0.0] * (n - 1), group_id=0) for n in lengths])


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 200))
def test_every_sequence_is_in_exactly_one_group_within_the_budget(lengths, budget):
    groups = bin_by_tokens(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in group) <= budget for group in groups)
    assert all(group == sorted(group) for group in groups)
    # Any two groups of a first-fit solution overfill one, so twice the ideal count is a safe ceiling.
    assert len(groups) <= max(1, 2 * -(-sum(lengths) // budget))


def test_groups_are_balanced_when_all_lengths_are_alike():
    groups = bin_by_tokens([10] * 12, 45)
    assert [len(group) for group in groups] == [4, 4, 4]


def test_long_sequences_are_placed_first_so_that_few_groups_suffice():
    assert bin_by_tokens([1, 2, 3, 6], 6) == [[3], [0, 1, 2]]


def test_a_budget_that_holds_everything_makes_one_group():
    assert bin_by_tokens([3, 1, 2], 6) == [[0, 1, 2]]


def test_the_split_does_not_depend_on_anything_but_the_lengths():
    lengths = [7, 3, 9, 3, 7, 1]
    assert bin_by_tokens(lengths, 12) == bin_by_tokens(list(lengths), 12)


def test_a_sequence_over_the_budget_is_refused_with_the_key_to_raise():
    with pytest.raises(
        ConfigError, match=r"sequence of 9 tokens does not fit .* 8 tokens; raise .*max_token_len_per_gpu"
    ):
        split_micro_batches(batch([3, 9]), MicroBatching(max_tokens=8))


@pytest.mark.parametrize(
    ("micro", "expected"),
    [
        (MicroBatching(), [[0, 1, 2, 3, 4]]),
        (MicroBatching(max_sequences=2), [[0, 1], [2, 3], [4]]),
        (MicroBatching(max_sequences=9), [[0, 1, 2, 3, 4]]),
        (MicroBatching(max_tokens=100), [[0, 1, 2, 3, 4]]),
    ],
)
def test_limits_that_are_not_set_do_not_limit(micro, expected):
    assert split_micro_batches(batch([3, 1, 4, 1, 5]), micro) == expected


@pytest.mark.parametrize("lengths", [[3, 1, 4, 1, 5, 2, 6, 5], [7, 1, 1, 1, 1, 1, 1, 1]])
@pytest.mark.parametrize("budget", [8, 9, 12, 20])
def test_both_limits_hold_together(budget, lengths):
    groups = split_micro_batches(batch(lengths), MicroBatching(max_tokens=budget, max_sequences=2))
    assert sorted(i for group in groups for i in group) == list(range(8))
    assert all(len(group) <= 2 and sum(lengths[i] for i in group) <= budget for group in groups)


@pytest.mark.parametrize("limits", [{"max_tokens": 0}, {"max_sequences": 0}, {"max_sequences": -1}])
def test_limits_below_one_are_refused_not_taken_for_no_limit(limits):
    with pytest.raises(ConfigError, match="must be at least 1"):
        MicroBatching(**limits)


def test_no_sequences_make_no_forward():
    assert bin_by_tokens([], 8) == []
    empty = batch([2]).select([])
    assert split_micro_batches(empty, MicroBatching(max_tokens=8)) == []
    assert split_micro_batches(empty, MicroBatching()) == []


def test_many_short_sequences_are_split_quickly():
    groups = bin_by_tokens([1 + i % 7 for i in range(20_000)], 64)
    assert sum(map(len, groups)) == 20_000
