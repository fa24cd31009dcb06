"""Worker groups: what a group promises, in every runtime there is."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.runtime_workers import Counter, Holder
from tests.small_ray import cpus, small_ray
from verl.data.batch import Batch
from verl.runtime.group import Layout, RankPlace, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.pools import Pool, WorkerPools, describe_pools
from verl.runtime.processes import ProcessGroup
from verl.runtime.ray_cluster import Cluster
from verl.runtime.ray_group import RayGroup
from verl.utils.errors import WorkerError

pytestmark = pytest.mark.usefixtures("spawned_ranks")


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessGroup]:
    group = ProcessGroup(Counter, Layout.data_parallel(2))
    yield group
    group.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with small_ray() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray(cluster: Cluster) -> Iterator[RayGroup]:
    group = RayGroup(Counter, Layout.data_parallel(2), cpus())
    yield group
    group.close()


@pytest.fixture(params=["inline", "processes", pytest.param("ray", marks=pytest.mark.ray)])
def group(request: pytest.FixtureRequest) -> WorkerGroup:
    if request.param == "inline":
        return InlineGroup(Counter())
    group = request.getfixturevalue(request.param)
    group.broadcast("reset")
    return group


def test_broadcast_calls_every_rank_in_order(group: WorkerGroup):
    ranks = group.layout.world_size
    assert group.broadcast("add", 2, 3) == [6] * ranks
    assert group.broadcast("add", 1) == [7] * ranks


def test_threads_of_every_rank_sleep_while_they_wait(group: WorkerGroup):
    wanted = os.environ.get("OMP_WAIT_POLICY")
    assert wanted is not None or {"GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys()
    assert group.broadcast("variable", "OMP_WAIT_POLICY") == [wanted] * group.layout.world_size


def test_scatter_gives_each_data_parallel_group_its_shard(group: WorkerGroup):
    shards = [5 + i for i in range(group.layout.dp)]
    assert group.scatter("add", shards, 2) == [2 * shard for shard in shards]


def test_a_wrong_number_of_shards_is_refused(group: WorkerGroup):
    with pytest.raises(ValueError, match="one shard"):
        group.scatter("add", [1] * (group.layout.dp + 1))


def test_a_failure_says_what_happened_and_leaves_the_group_usable(group: WorkerGroup):
    with pytest.raises((LookupError, WorkerError), match="broken on purpose"):
        group.broadcast("fail")
    assert group.broadcast("add", 1) == [1] * group.layout.world_size


def test_columns_travel_unchanged(group: WorkerGroup):
    batch = Batch(torch.tensor([0, 2, 2]), {"tokens": torch.tensor([7, 9])}, {"rewards": torch.tensor([0.5, 1.5])})
    batch = batch.with_columns(half=torch.tensor([0.5, -1.0], dtype=torch.bfloat16))
    for out in group.scatter("twice", [batch] * group.layout.dp):
        assert out["tokens"].tolist() == [14, 18]
        assert out["half"].dtype == torch.bfloat16 and out["half"].tolist() == [1.0, -2.0]


@pytest.mark.parametrize("runtime", ["inline", "processes", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_part_of_a_worker_is_a_group_in_the_layout_that_it_gives(runtime: str, request: pytest.FixtureRequest):
    whole: WorkerGroup
    if runtime == "ray":
        request.getfixturevalue("cluster")
        whole = RayGroup(Holder, Layout.data_parallel(2), cpus())
    else:
        whole = InlineGroup(Holder()) if runtime == "inline" else ProcessGroup(Holder, Layout.data_parallel(2))
    part = whole.for_role("counter")
    last = whole.layout.world_size - 1
    assert part.layout.dp == 1 and part.layout.output_ranks == (last,)
    assert part.scatter("rank_and_shard", [7]) == [(last, 7)]
    assert part.broadcast("add", 4) == [4] * (last + 1)
    assert [call.result(timeout=60) for call in part.post(last, "add", [(1,), (1,)])] == [5, 6]
    assert (part.local_worker is None) == (runtime != "inline")
    whole.close()


def test_pools_are_groups_of_their_own_on_devices_of_their_own(capfd: pytest.CaptureFixture[str]):
    first, second = Pool("first", ("policy", "counter")), Pool("second", ("other",), 2, first_device=1)

    def start(pool: Pool) -> WorkerGroup:
        if pool is first:
            return InlineGroup(Holder())
        return ProcessGroup(Holder, Layout.data_parallel(pool.num_devices), pool.name, pool.first_device, 3)

    pools = WorkerPools((first, second), start)
    try:
        assert pools.num_ranks == 3 and describe_pools(pools.groups) == "3 ranks (first 1, second 2)"
        assert pools.broadcast("local_rank") == ["inline", "1", "2"]
        assert pools.for_role("counter").broadcast("add", 1) == [1]
        assert pools.group_of("policy") is pools.group_of("counter")
        assert pools.group_of("other").broadcast("counter.sum_over_ranks", 1.0) == [2.0, 2.0]
        assert pools.group_of("other").broadcast("counter.add", 2) == [2, 2]
    finally:
        pools.close()
    assert "[second rank 1] at work" in capfd.readouterr().err
    with pytest.raises(WorkerError, match="closed"):
        pools.broadcast("local_rank")


def test_a_pool_that_cannot_start_closes_those_before_it():
    closed = []

    def start(pool: Pool) -> WorkerGroup:
        if pool.name == "second":
            raise LookupError("cannot be built")
        group = InlineGroup(Holder())
        group.close = lambda: closed.append(pool.name)  # type: ignore[method-assign]
        return group

    with pytest.raises(LookupError, match="cannot be built"):
        WorkerPools((Pool("first", ("a",)), Pool("second", ("b",))), start)
    assert closed == ["first"]


def test_posted_coroutines_run_beside_each_other_and_calls_between_them(group: WorkerGroup):
    waiting = group.post(0, "pass_gate", [(), (), ()])
    assert group.broadcast("add", 1) == [1] * group.layout.world_size
    assert not any(call.done() for call in waiting)
    while group.broadcast("number_at_gate")[0] < 3:
        time.sleep(0.001)
    group.broadcast("open_gate")
    assert [call.result(timeout=60) for call in waiting] == [3, 3, 3]


def test_a_coroutine_method_is_waited_for(group: WorkerGroup):
    group.broadcast("open_gate")
    assert group.broadcast("pass_gate") == [1] * group.layout.world_size


def test_a_posted_failure_is_that_of_its_call(group: WorkerGroup):
    broken, fine = group.post(0, "fail", [()])[0], group.post(0, "add", [(2,)])[0]
    assert fine.result(timeout=60) == 2
    assert "broken on purpose" in str(broken.exception(timeout=60))


def test_every_rank_receives_the_calls_of_concurrent_threads_in_one_order(group: WorkerGroup):
    """Calls with long arguments: parts of two messages would mix, and ranks in a collective would wait forever."""
    batch = Batch(torch.tensor([0, 1 << 20]), {"tokens": torch.zeros(1 << 20, dtype=torch.int64)}, {})
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: group.broadcast("remember", number, batch), range(40)))
    orders = group.broadcast("remembered")
    assert sorted(orders[0]) == list(range(40)) and all(order == orders[0] for order in orders)


def test_an_inline_failure_keeps_its_own_traceback():
    with pytest.raises(LookupError, match="on purpose"):
        InlineGroup(Counter()).broadcast("fail")


def test_a_layout_counts_ranks_and_needs_one_answer_per_group():
    layout = Layout.data_parallel(3, 2)
    assert (layout.world_size, layout.dp, layout.output_ranks) == (6, 3, (0, 2, 4))
    assert Layout((RankPlace(1), RankPlace(0))).output_ranks == (1, 0)
    for places in ((RankPlace(0), RankPlace(0)), (RankPlace(0, False),), (RankPlace(1),)):
        with pytest.raises(ValueError, match="one rank that returns outputs"):
            Layout(places)
    assert InlineGroup(Counter()).layout.world_size == 1
