"""Worker groups whose ranks are processes of their own: errors, deaths and ends."""

import atexit
import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import connection
from pathlib import Path

import pytest

from tests.runtime_workers import Broken, BrokenOnOne, Counter
from tests.tiers import soak
from verl.runtime.calls import _Call
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup
from verl.runtime.wire import NotSerializableError
from verl.utils.cores import num_cores
from verl.utils.errors import WorkerError

pytestmark = pytest.mark.usefixtures("spawned_ranks")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessGroup]:
    group = ProcessGroup(Counter, Layout.data_parallel(2))
    yield group
    group.close()


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
    each = int(wanted) if wanted else max(1, num_cores() // 2)
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
    group._fail_and_kill(WorkerError(0, "rank", "lost"))
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


def test_a_worker_that_only_one_rank_cannot_build_says_why_too(capfd: pytest.CaptureFixture[str]):
    """Its process stays until the driver has heard: an end of its own would hide what it said."""
    with pytest.raises(WorkerError, match="cannot be built here"):
        ProcessGroup(BrokenOnOne, Layout.data_parallel(2))
    assert "Traceback" not in capfd.readouterr().err


class SentOnce:
    """Builds a worker; only the first rank can be sent it."""

    def __init__(self) -> None:
        self.is_sent = False

    def __reduce__(self) -> tuple:
        if self.is_sent:
            raise OSError(errno.EMFILE, "too many open files")
        self.is_sent = True
        return partial, (Counter,)


def test_ranks_that_have_started_end_where_another_cannot_start(monkeypatch: pytest.MonkeyPatch):
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    before = set(multiprocessing.active_children())
    with pytest.raises(OSError, match="too many open files"):
        ProcessGroup(SentOnce(), Layout.data_parallel(2))
    assert set(multiprocessing.active_children()) <= before
    [close] = at_exit
    close()
    monkeypatch.setattr(socket, "create_server", lambda *_: pytest.fail("no port is free"))
    with pytest.raises(pytest.fail.Exception, match="no port is free"):
        ProcessGroup(Counter, Layout())


CALLING = """group.post(0, "sum_over_ranks", [(1.0,)])"""
CLOSING = """
    import threading, time
    group.post(0, "sleep", [(600.0,)])  # the rank is in a call that ends only after the driver asks to end
    threading.Thread(target=group.close, daemon=True).start()
    time.sleep({})
"""


@pytest.mark.parametrize(
    "before_death",
    [CALLING, *(CLOSING.format(wait) for wait in (0.0, 0.3)), *soak(CLOSING.format(n / 50) for n in range(1, 51))],
)
def test_ranks_end_with_their_driver(tmp_path: Path, before_death: str):
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from tests.runtime_workers import Counter
            from verl.runtime.group import Layout
            from verl.runtime.processes import ProcessGroup

            if __name__ == "__main__":
                group = ProcessGroup(Counter, Layout())
                print(*group.broadcast("process"), flush=True)
            """
        )
        + textwrap.indent(f"{textwrap.dedent(before_death).strip()}\nos.kill(os.getpid(), signal.SIGKILL)\n", "    ")
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
