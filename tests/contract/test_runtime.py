"""Worker groups: what a group promises, in every runtime there is."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from verl.data.batch import Batch
from verl.runtime.group import Layout, RankPlace, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.pools import Pool, WorkerPools, describe_pools
from verl.runtime.processes import ProcessGroup, _Call
from verl.runtime.wire import NotSerializableError
from verl.utils.errors import ConfigError, WorkerError

ROOT = Path(__file__).resolve().parents[2]


class Counter:
    def __init__(self) -> None:
        self.reset()

    def add(self, number: int, times: int = 1) -> int:
        self.total += number * times
        return self.total

    def reset(self) -> None:
        self.total = self.at_gate = 0
        self.gate_is_open = False
        self.numbers: list[int] = []

    def remember(self, number: int, batch: Batch) -> None:
        self.numbers.append(number)

    def remembered(self) -> list[int]:
        return self.numbers

    def fail(self) -> None:
        raise LookupError("broken on purpose")

    def refuse(self) -> None:
        raise ConfigError("the key is wrong")

    def twice(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"tokens": batch["tokens"] * 2, "half": batch["half"] * 2}

    def closure(self) -> object:
        return lambda: None

    def rank(self) -> int:
        return dist.get_rank()

    def process(self) -> int:
        return os.getpid()

    def threads(self) -> int:
        return torch.get_num_threads()

    def sum_over_ranks(self, number: float) -> float:
        total = torch.tensor(number)
        dist.all_reduce(total)
        return total.item()

    def fail_on(self, rank: int) -> float:
        if dist.get_rank() == rank:
            raise LookupError(f"only rank {rank}")
        return self.sum_over_ranks(1.0)  # waits for the rank that failed

    def die_on(self, rank: int) -> float:
        if dist.get_rank() == rank:
            os.write(2, b"about to go\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.sum_over_ranks(1.0)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def pass_gate(self) -> int:
        self.at_gate += 1
        while not self.gate_is_open:
            await asyncio.sleep(0.001)
        return self.at_gate

    def number_at_gate(self) -> int:
        return self.at_gate

    def open_gate(self) -> None:
        self.gate_is_open = True


class Placed(Counter):
    """Part of a worker: its ranks are one data-parallel group, whose last rank returns the outputs."""

    def place(self) -> RankPlace:
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        return RankPlace(0, returns_outputs=is_last)

    def rank_and_shard(self, shard: int) -> tuple[int, int]:
        return (dist.get_rank() if dist.is_initialized() else 0, shard)


class Holder:
    def __init__(self) -> None:
        self.counter = Placed()

    def local_rank(self) -> str:
        print("at work", file=sys.stderr, flush=True)
        return os.environ.get("LOCAL_RANK", "inline")


class Broken:
    def __init__(self) -> None:
        raise LookupError("cannot be built")


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessGroup]:
    group = ProcessGroup(Counter, Layout.data_parallel(2))
    yield group
    group.close()


@pytest.fixture(params=["inline", "processes"])
def group(request: pytest.FixtureRequest) -> WorkerGroup:
    if request.param == "inline":
        return InlineGroup(Counter())
    group = request.getfixturevalue("processes")
    group.broadcast("reset")
    return group


def test_broadcast_calls_every_rank_in_order(group: WorkerGroup):
    ranks = group.layout.world_size
    assert group.broadcast("add", 2, 3) == [6] * ranks
    assert group.broadcast("add", 1) == [7] * ranks


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


@pytest.mark.parametrize("runtime", ["inline", "processes"])
def test_a_part_of_a_worker_is_a_group_in_the_layout_that_it_gives(runtime: str):
    whole = InlineGroup(Holder()) if runtime == "inline" else ProcessGroup(Holder, Layout.data_parallel(2))
    part = whole.for_role("counter")
    last = whole.layout.world_size - 1
    assert part.layout.dp == 1 and part.layout.output_ranks == (last,)
    assert part.scatter("rank_and_shard", [7]) == [(last, 7)]
    assert part.broadcast("add", 4) == [4] * (last + 1)
    assert [call.result(timeout=60) for call in part.post(last, "add", [(1,), (1,)])] == [5, 6]
    assert (part.local_worker is None) == (runtime == "processes")
    whole.close()


def test_pools_are_groups_of_their_own_on_devices_of_their_own(capfd: pytest.CaptureFixture[str]):
    first, second = Pool("first", ("policy", "counter")), Pool("second", ("other",), 2, first_device=1)

    def start(pool: Pool) -> WorkerGroup:
        if pool is first:
            return InlineGroup(Holder())
        return ProcessGroup(Holder, Layout.data_parallel(pool.num_ranks), pool.name, pool.first_device, 3)

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


# --- ranks in processes of their own ----------------------------------------------------------------------------------


def test_ranks_are_joined_by_torch_distributed(processes: ProcessGroup):
    assert processes.broadcast("rank") == [0, 1]
    assert processes.broadcast("sum_over_ranks", 1.5) == [3.0, 3.0]
    assert len({os.getpid(), *processes.broadcast("process")}) == 3


def test_a_remote_failure_names_rank_method_and_line(processes: ProcessGroup):
    with pytest.raises(WorkerError) as caught:
        processes.broadcast("fail")
    assert caught.value.rank in (0, 1) and caught.value.method == "fail"
    assert 'raise LookupError("broken on purpose")' in caught.value.remote_traceback


def test_a_mistake_that_explains_itself_comes_without_a_traceback(processes: ProcessGroup):
    with pytest.raises(WorkerError) as caught:
        processes.broadcast("refuse")
    assert str(caught.value) == f"rank {caught.value.rank} failed in refuse(): the key is wrong"


def test_a_result_that_cannot_travel_is_a_failed_call(processes: ProcessGroup):
    with pytest.raises(WorkerError, match="cannot travel"):
        processes.broadcast("closure")
    assert processes.broadcast("rank") == [0, 1]


def test_an_argument_that_cannot_travel_reaches_no_rank(processes: ProcessGroup):
    with pytest.raises(NotSerializableError, match="cannot travel"):
        processes.broadcast("add", lambda: None)
    assert len(processes.broadcast("rank")) == 2


def test_the_cores_are_shared_unless_the_user_said_otherwise(processes: ProcessGroup):
    wanted = os.environ.get("OMP_NUM_THREADS")
    each = int(wanted) if wanted else max(1, len(os.sched_getaffinity(0)) // 2)
    assert processes.broadcast("threads") == [each, each]


def test_replicas_get_the_same_shard_and_answer_once():
    group = ProcessGroup(Counter, Layout.data_parallel(1, 2))
    try:
        assert group.scatter("add", [3]) == [3]
        assert group.broadcast("add", 1) == [4, 4]
    finally:
        group.close()
    with pytest.raises(WorkerError, match="closed"):
        group.broadcast("rank")


def test_one_rank_that_fails_while_others_wait_for_it_ends_the_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.runtime.processes.GRACE_S", 0.5)
    group = ProcessGroup(Counter, Layout.data_parallel(2))
    with pytest.raises(WorkerError, match="only rank 1") as caught:
        group.broadcast("fail_on", 1)
    assert caught.value.rank == 1
    with pytest.raises(WorkerError, match="only rank 1"):
        group.broadcast("rank")
    assert all(not process.is_alive() or process.join(5) is None for process in group._processes)
    group.close()


def test_a_killed_rank_is_named_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.runtime.processes.GRACE_S", 60.0)
    group = ProcessGroup(Counter, Layout.data_parallel(2))
    start = time.perf_counter()
    with pytest.raises(WorkerError, match="SIGKILL") as caught:
        group.broadcast("die_on", 1)
    assert caught.value.rank == 1 and caught.value.method == "die_on"
    assert "about to go" in str(caught.value) and "checkpoint" in str(caught.value)
    assert time.perf_counter() - start < 50  # GRACE_S is 60
    group.close()


def test_every_call_in_flight_hears_of_a_death_though_their_caller_gives_up_at_the_first():
    group = ProcessGroup(Counter, Layout.data_parallel(2))
    naps = group.post(0, "nap", [(600.0,), (600.0,), (600.0,)])
    naps[0].add_done_callback(lambda _: [nap.cancel() for nap in naps])  # as asyncio.gather does
    os.kill(group.broadcast("process")[1], signal.SIGKILL)
    assert all(isinstance(nap.exception(timeout=60), WorkerError) for nap in naps)
    for process in group._processes:
        process.join(60)
    assert [process.exitcode for process in group._processes] == [-signal.SIGKILL] * 2
    group.close()


def test_a_call_of_another_thread_fails_when_the_group_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl.runtime.processes.GRACE_S", 0.2)
    group = ProcessGroup(Counter, Layout.data_parallel(2))
    [nap] = group.post(1, "nap", [(600.0,)])
    with ThreadPoolExecutor(1) as thread:
        sleep = thread.submit(group.broadcast, "sleep", 600.0)
        while len(group._calls) < 2:
            time.sleep(0.01)
        group.close()
        with pytest.raises(WorkerError, match=r"failed in sleep\(\): the group was closed before it answered"):
            sleep.result(timeout=60)
    assert isinstance(nap.exception(timeout=60), WorkerError)


def test_an_answer_that_comes_after_another_rank_died_is_dropped():
    group = ProcessGroup(Counter, Layout.data_parallel(2))
    with pytest.raises(WorkerError, match="SIGKILL"):
        group.broadcast("die_on", 1)
    group._resolve(0, 1, True, None)
    group.close()


def test_an_answer_that_comes_while_the_group_is_being_given_up_stands():
    group = ProcessGroup(Counter, Layout())
    [answer] = group.post(0, "rank", [()])
    assert answer.result() == 0
    answer.done = lambda: False  # type: ignore[method-assign]  # as it was a moment ago
    group._calls[99] = _Call("rank", {0: answer})
    group._fail_group(WorkerError(0, "rank", "lost"))
    group._processes[0].join(60)
    assert answer.result() == 0 and group._processes[0].exitcode == -signal.SIGKILL


def test_a_rank_killed_between_calls_is_named_by_the_next_one(monkeypatch: pytest.MonkeyPatch):
    """By the thread that watches it: of two that ask how it ended, one may learn nothing."""
    group, died, asked = ProcessGroup(Counter, Layout()), ProcessGroup._on_death, []

    def late(group: ProcessGroup, rank: int) -> None:
        asked.append(threading.current_thread())
        time.sleep(0.5)
        died(group, rank)

    monkeypatch.setattr(ProcessGroup, "_on_death", late)
    (victim,) = group.broadcast("process")
    os.kill(victim, signal.SIGKILL)
    connection.wait([group._processes[0].sentinel])
    with pytest.raises(WorkerError, match="SIGKILL"):
        group.broadcast("rank")
    assert len(asked) == 1 and asked[0] is not threading.current_thread()
    group.close()


def test_a_worker_that_cannot_be_built_says_why():
    with pytest.raises(WorkerError, match="cannot be built") as caught:
        ProcessGroup(Broken, Layout())
    assert caught.value.method == "__init__"


class BrokenOnOne:
    def __init__(self) -> None:
        if dist.get_rank() == 1:
            raise LookupError("cannot be built here")
        time.sleep(1.0)


def test_a_worker_that_only_one_rank_cannot_build_says_why_too(capfd: pytest.CaptureFixture[str]):
    """Its process stays until the driver has heard: an end of its own would hide what it said."""
    with pytest.raises(WorkerError, match="cannot be built here"):
        ProcessGroup(BrokenOnOne, Layout.data_parallel(2))
    assert "Traceback" not in capfd.readouterr().err


def test_ranks_end_with_their_driver(tmp_path: Path):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from tests.contract.test_runtime import Counter
            from verl.runtime.group import Layout
            from verl.runtime.processes import ProcessGroup

            if __name__ == "__main__":
                group = ProcessGroup(Counter, Layout())
                print(*group.broadcast("process"), flush=True)
                group.post(0, "sum_over_ranks", [(1.0,)])
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    rank = int(done.stdout)
    for _ in range(1200):
        if not Path(f"/proc/{rank}").exists() or "State:\tZ" in Path(f"/proc/{rank}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(rank, signal.SIGKILL)
    pytest.fail("the rank outlived its driver")
