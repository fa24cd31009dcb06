"""Worker groups: the two verbs, in every runtime there is."""

import pytest

from verl.runtime.group import Layout
from verl.runtime.inline import InlineGroup


class Counter:
    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int, times: int = 1) -> int:
        self.total += number * times
        return self.total

    def fail(self) -> None:
        raise LookupError("broken on purpose")


@pytest.fixture
def group():
    return InlineGroup(Counter())


def test_broadcast_calls_every_rank(group):
    assert group.broadcast("add", 2, 3) == [6]
    assert group.broadcast("add", 1) == [7]


def test_scatter_gives_each_data_parallel_rank_its_shard(group):
    assert group.scatter("add", [5], 2) == [10]


def test_a_wrong_number_of_shards_is_refused(group):
    with pytest.raises(ValueError, match="one shard"):
        group.scatter("add", [1, 2])


def test_an_inline_failure_keeps_its_own_traceback(group):
    with pytest.raises(LookupError, match="on purpose"):
        group.broadcast("fail")


def test_layout_counts_ranks():
    assert Layout(dp=3, ranks_per_replica=2).world_size == 6
    assert InlineGroup(Counter()).layout.world_size == 1
