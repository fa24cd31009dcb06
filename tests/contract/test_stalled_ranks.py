"""A run whose ranks no longer move ends and names the culprit; one whose ranks work, or wait for calls, goes on."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.runtime_workers import Counter
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup
from verl.utils.errors import WorkerError

pytestmark = pytest.mark.usefixtures("spawned_ranks")

TIMEOUT_S = 1.5


class Worker(Counter):
    """Methods of which rank 1 does something while rank 0 waits for it in a collective."""

    def hash(self, seconds: float) -> float:
        """Rank 1 computes for this CPU time in one C call."""
        if dist.get_rank() == 1:
            start = time.thread_time()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000, dklen=640)  # 20 blocks, as no call takes 2**31 rounds
            per_round = (time.thread_time() - start) / 1_000
            hashlib.pbkdf2_hmac("sha256", b"", b"", int(seconds / per_round), dklen=640)
        return self.sum_over_ranks(1.0)

    def wait_for_a_child(self, seconds: float) -> float:
        """Rank 1 waits for another process, which computes for this CPU time."""
        if dist.get_rank() == 1:
            work = f"import time\nwhile time.process_time() < {seconds}: pass"
            subprocess.run([sys.executable, "-S", "-c", work], check=True)
        return self.sum_over_ranks(1.0)

    def sleep_outside(self) -> float:
        if dist.get_rank() == 1:
            time.sleep(600.0)
        return self.sum_over_ranks(1.0)

    def micro_batches(self) -> float:
        """Rank 1 has fewer micro-batches than rank 0, which reduces the gradient after each."""
        return sum(self.sum_over_ranks(1.0) for _ in range(3 - dist.get_rank()))

    def uneven_step(self) -> float:
        """As above, and all ranks meet at the end of the step."""
        total = self.micro_batches()
        dist.barrier()
        return total

    def stop(self) -> float:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return self.sum_over_ranks(1.0)

    def leave(self) -> float:
        if dist.get_rank() == 1:
            time.sleep(0.5)  # so that rank 0 waits, and hears that the connection was closed
            sys.exit(3)
        return self.sum_over_ranks(1.0)


@pytest.fixture(scope="module")
def group() -> Iterator[ProcessGroup]:
    """The last test of this group hangs."""
    group = ProcessGroup(Worker, Layout.data_parallel(2), stall_timeout_s=TIMEOUT_S)
    yield group
    group.close()


def failure(group: ProcessGroup, method: str) -> WorkerError:
    """The error of a call that fails, after which every rank has ended."""
    with pytest.raises(WorkerError) as caught:
        group.broadcast(method)
    for process in group._processes:
        process.join(60)
        assert process.exitcode is not None
    assert caught.value.exit_code != 0
    return caught.value


def test_a_rank_that_computes_in_one_c_call_is_not_stalled(group: ProcessGroup):
    assert group.broadcast("hash", 2 * TIMEOUT_S) == [2.0, 2.0]


def test_a_rank_that_waits_for_a_process_that_works_is_not_stalled(group: ProcessGroup):
    assert group.broadcast("wait_for_a_child", 2 * TIMEOUT_S) == [2.0, 2.0]


def test_a_rank_without_a_call_or_with_a_waiting_coroutine_is_not_stalled(group: ProcessGroup):
    [nap] = group.post(1, "nap", [(2.5 * TIMEOUT_S,)])
    assert nap.result() is None
    assert group.broadcast("rank") == [0, 1]


def test_a_rank_that_sleeps_while_the_other_waits_for_it_is_named_with_its_line(group: ProcessGroup):
    error = failure(group, "sleep_outside")
    text = str(error)
    assert (error.rank, error.method) == (1, "sleep_outside")
    assert text.startswith(
        "rank 1 failed in sleep_outside():\nit has not entered the collective in which others wait\n"
    )
    assert (
        "test_stalled_ranks.py" in text
        and "in sleep_outside(): time.sleep(600.0)\nrank 0 waits in all_reduce()" in text
    )
    assert "in sum_over_ranks(): dist.all_reduce(total)\n" in text
    with pytest.raises(WorkerError, match="it has not entered"):
        group.broadcast("rank")


def test_a_stopped_rank_is_named_though_it_cannot_say_where_it_is():
    group = ProcessGroup(Worker, Layout.data_parallel(2), stall_timeout_s=TIMEOUT_S)
    error = failure(group, "stop")
    group.close()
    assert (error.rank, error.method) == (1, "stop")
    assert "it is stopped" in str(error) and "state T" in str(error)
    assert "rank 0 waits in all_reduce()" in str(error)


@pytest.mark.parametrize(
    ("method", "culprit", "says"),
    [
        ("micro_batches", 1, "it has left the call without entering the collective in which others wait"),
        ("uneven_step", 0, "it waits in another collective than others do"),
    ],
)
def test_unequal_numbers_of_micro_batches_are_named_with_the_lines(method: str, culprit: int, says: str):
    group = ProcessGroup(Worker, Layout.data_parallel(2), stall_timeout_s=TIMEOUT_S)
    error = failure(group, method)
    group.close()
    assert (error.rank, error.method) == (culprit, method) and says in str(error)
    assert "in sum_over_ranks(): dist.all_reduce(total)" in str(error)
    assert ("in uneven_step(): dist.barrier()" in str(error)) == (method == "uneven_step")


def test_what_a_rank_raised_comes_before_what_the_others_say_of_its_end():
    group = ProcessGroup(Worker, Layout.data_parallel(2))
    error = failure(group, "leave")
    group.close()
    first, later = str(error).split("SystemExit: 3\n")
    assert error.rank == 1 and "in leave\n    sys.exit(3)" in first
    assert "Connection closed" not in first and "rank 1 in leave(): its process ended with exit code 3" in later
