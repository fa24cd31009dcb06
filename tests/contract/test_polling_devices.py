"""Ranks that use a core while they wait in a collective are stalled all the same, and are told from those that work."""

import hashlib
import time

import pytest
import torch
import torch.distributed as dist

from tests.runtime_workers import Counter
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup
from verl.utils.errors import WorkerError

TIMEOUT_S = 2.0


class Worker(Counter):
    """Waits as a GPU's library does: outside of the collective's function, on a core."""

    def poll(self, group: dist.ProcessGroup | None = None) -> float:
        total = torch.tensor(1.0)
        work = dist.all_reduce(total, group=group, async_op=True)
        while not work.is_completed():
            pass
        return total.item()

    def poll_while_the_other_computes(self, seconds: float) -> float:
        """Rank 1 computes for this CPU time in one C call."""
        if dist.get_rank() == 1:
            start = time.thread_time()
            hashlib.pbkdf2_hmac("sha256", b"", b"", 20_000)
            hashlib.pbkdf2_hmac("sha256", b"", b"", int(20_000 * seconds / (time.thread_time() - start)))
        return self.poll()

    def poll_while_the_other_sleeps(self) -> float:
        if dist.get_rank() == 1:
            time.sleep(600.0)
        return self.poll()

    def poll_alone(self) -> float:
        return self.poll() if dist.get_rank() == 0 else 0.0

    def poll_in_different_groups(self) -> float:
        return self.poll([dist.new_group([0, 1]), dist.new_group([0, 1])][dist.get_rank()])


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "tests.polling_device")
    monkeypatch.setenv("VERL_PLATFORM", "polling")
    group = ProcessGroup(Worker, Layout.data_parallel(2), stall_timeout_s=TIMEOUT_S)
    yield group
    group.close()


def stall(group: ProcessGroup, method: str) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        group.broadcast(method)
    assert caught.value.is_stall
    return caught.value


def test_a_rank_that_polls_waits_and_the_one_that_sleeps_is_named(group: ProcessGroup):
    assert group.broadcast("poll_while_the_other_computes", 2 * TIMEOUT_S) == [2.0, 2.0]
    error = stall(group, "poll_while_the_other_sleeps")
    assert error.rank == 1 and "\nit has not entered the collective in which others wait\n" in str(error)
    wait = "rank 0 waits in gloo:all_reduce number 2 of group 0 (default_pg), on its device, at "
    assert wait in str(error) and "test_polling_devices.py" in str(error).split(wait)[1].splitlines()[0]


def test_a_rank_that_left_the_call_is_named_by_the_one_that_polls(group: ProcessGroup):
    error = stall(group, "poll_alone")
    assert error.rank == 1 and "\nit has left the call without entering the collective" in str(error)


def test_ranks_that_poll_in_different_groups_are_told_apart(group: ProcessGroup):
    error = stall(group, "poll_in_different_groups")
    assert "\nit waits in another collective than others do\n" in str(error)
    assert "gloo:all_reduce number 1 of group 1 (" in str(error) and "of group 2 (" in str(error)
    assert "on its device, and no bytes for " in str(error)
