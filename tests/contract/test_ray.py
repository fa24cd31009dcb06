"""Worker groups of Ray's actors: errors, deaths, shared devices, refusals, and which Ray a run uses."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.test_stalled_ranks import TIMEOUT_S, Worker
from tests.runtime_workers import Broken, Counter, Reader
from tests.small_ray import NUM_CPUS, cpus, small_ray
from verl.data.batch import Batch
from verl.plugin.platform import choose_platform
from verl.runtime import ray_cluster
from verl.runtime.group import Layout
from verl.runtime.rank_observation import Counters
from verl.runtime.ray_cluster import Cluster, Devices, join_cluster
from verl.runtime.ray_group import INLINE_BYTES, RayGroup
from verl.runtime.wire import NotSerializableError
from verl.utils.errors import ConfigError, WorkerError

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with small_ray() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def group(cluster: Cluster) -> Iterator[RayGroup]:
    group = RayGroup(Reader, Layout.data_parallel(2), cpus())
    yield group
    group.close()


def long_batch(value: int) -> Batch:
    return Batch(torch.tensor([0, 1 << 20]), {"tokens": torch.full((1 << 20,), value)}, {})


def test_ranks_are_joined_by_torch_distributed_and_fail_by_name(group: RayGroup):
    assert group.broadcast("sum_over_ranks", 1.5) == [3.0, 3.0]
    assert len({os.getpid(), *group.broadcast("process")}) == 3
    with pytest.raises(WorkerError) as caught:
        group.broadcast("fail")
    assert caught.value.rank in (0, 1) and 'raise LookupError("broken on purpose")' in caught.value.remote_traceback


def test_large_arguments_lie_in_the_object_store_once(group: RayGroup, monkeypatch: pytest.MonkeyPatch):
    ray = pytest.importorskip("ray")
    puts = []
    monkeypatch.setattr(ray, "put", lambda item, put=ray.put: puts.append(item) or put(item))
    batch = long_batch(1)
    assert batch["tokens"].nbytes > INLINE_BYTES
    assert group.broadcast("keep", batch) == [True, True]
    assert len(puts) == 1  # for both ranks
    batch["tokens"].fill_(5)
    group.scatter("remember", [1, 2], long_batch(7))
    assert group.broadcast("sum_kept") == [1 << 20] * 2  # what was sent, after other objects too
    with pytest.raises(NotSerializableError, match="cannot travel"):
        group.broadcast("add", lambda: None)
    with pytest.raises(WorkerError, match="cannot travel"):
        group.broadcast("closure")


def test_a_shard_is_one_object_that_its_ranks_read_where_it_lies(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    ray = pytest.importorskip("ray")
    puts, sent = [], []
    monkeypatch.setattr(ray, "put", lambda item, put=ray.put: puts.append(item) or put(item))
    halves = Devices(choose_platform("cpu"), share=0.5)  # of a core for a rank
    group = RayGroup(Reader, Layout.data_parallel(2, ranks_per_group=2), halves)
    send = group._send
    monkeypatch.setattr(group, "_send", lambda rank, calls, body: (sent.append(body), send(rank, calls, body)))
    try:
        assert group.scatter("keep", [long_batch(1), long_batch(3)]) == [True, True]  # no copy in any rank
        assert len(puts) == 2 and sent[0] is sent[1] is not sent[2] is sent[3]  # two ranks each; a reference to it
        assert all(isinstance(body, ray.ObjectRef) for body in sent)
        assert group.broadcast("sum_kept") == [1 << 20, 1 << 20, 3 << 20, 3 << 20]
        assert len(puts) == 2  # small calls and results need none
    finally:
        group.close()


def test_a_dead_rank_is_named_with_the_call_that_it_ran(group: RayGroup):
    with pytest.raises(WorkerError, match=r"rank 1 failed in die_on\(\):\nits actor on node \S+ has ended") as caught:
        group.broadcast("die_on", 1)
    assert caught.value.rank == 1
    with pytest.raises(WorkerError, match="die_on"):
        group.broadcast("add", 1)


def test_closing_fails_the_calls_of_other_threads_and_frees_the_cores(cluster: Cluster):
    group = RayGroup(Counter, Layout.data_parallel(1), cpus())
    [call] = group.post(0, "nap", [(600.0,)])
    group.close()
    with pytest.raises(WorkerError, match="closed before it answered"):
        call.result(timeout=30)
    with pytest.raises(WorkerError, match="closed"):
        group.broadcast("rank")
    assert has_free(NUM_CPUS)


def has_free(cores: int) -> bool:
    """Whether so many cores are free within 10 s."""
    ray = pytest.importorskip("ray")
    return comes_true(lambda: ray.available_resources().get("CPU") == cores)


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it holds within 10 s."""
    deadline = time.monotonic() + 10
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds


def test_a_rank_that_does_not_move_is_named_with_its_line_and_one_that_computes_is_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))  # the driver's, where ranks could not write
    group = RayGroup(Worker, Layout.data_parallel(2), cpus(), stall_timeout_s=TIMEOUT_S)
    assert group.broadcast("hash", 2 * TIMEOUT_S) == [2.0, 2.0]
    [nap] = group.post(1, "nap", [(2.5 * TIMEOUT_S,)])
    assert nap.result() is None
    with pytest.raises(WorkerError) as caught:
        group.broadcast("sleep_outside")
    group.close()
    text = str(caught.value)
    assert (caught.value.rank, caught.value.method) == (1, "sleep_outside")
    assert "\nit has not entered the collective in which others wait\n" in text and "\nnode " in text
    assert "in sleep_outside(): time.sleep(600.0)\nrank 0 waits in all_reduce()" in text
    assert "in sum_over_ranks(): dist.all_reduce(total)\n" in text
    assert has_free(NUM_CPUS)


def test_a_stopped_rank_is_named_and_ended(cluster: Cluster):
    group = RayGroup(Worker, Layout.data_parallel(2), cpus(), stall_timeout_s=TIMEOUT_S)
    processes = group.broadcast("process")
    with pytest.raises(WorkerError, match="it is stopped") as caught:
        group.broadcast("stop")
    group.close()
    assert caught.value.rank == 1 and f"process {processes[1]}, state T" in str(caught.value)
    assert has_free(NUM_CPUS)
    assert comes_true(lambda: (now := Counters.read(processes[1])) is None or now.state == "Z")


def test_the_error_of_a_rank_comes_before_what_others_say_of_it(cluster: Cluster):
    group = RayGroup(Counter, Layout.data_parallel(2), cpus())
    with pytest.raises(WorkerError, match=r"LookupError: only rank 1\nrank 0 waits in all_reduce\(\) at .*ended there"):
        group.broadcast("fail_on", 1)
    group.close()


def test_a_worker_that_cannot_be_built_says_why(cluster: Cluster):
    with pytest.raises(WorkerError, match="cannot be built"):
        RayGroup(Broken, Layout.data_parallel(1), cpus())


def test_too_few_devices_are_refused_at_once_with_the_numbers(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=r"needs 1 node with 5 CPU each, but 0 of the cluster's 1 .* \(4 CPU\)"):
        RayGroup(Counter, Layout.data_parallel(5), cpus())
    with pytest.raises(ConfigError, match=r"needs 2 nodes with 1 CPU each, but 1 of the cluster's 1"):
        RayGroup(Counter, Layout.data_parallel(2), Devices(choose_platform("cpu"), num_nodes=2))
    assert time.monotonic() - begin < 10
    monkeypatch.setattr(ray_cluster, "RESERVE_S", 1.0)
    group = RayGroup(Counter, Layout.data_parallel(1), cpus())
    try:
        with pytest.raises(ConfigError, match=r"with 4 CPU each, but after 1 s only 3 CPU of the cluster are free"):
            RayGroup(Counter, Layout.data_parallel(4), cpus())
    finally:
        group.close()


def test_a_program_that_has_joined_a_ray_stays_in_it(cluster: Cluster):
    again = join_cluster({"num_cpus": 1})
    text = again.describe(choose_platform("cpu"), 2)
    assert text == "Ray: in the one that this program has joined already; 1 node, 4 CPU, asked for 2"
    again.leave()
    assert pytest.importorskip("ray").is_initialized()
