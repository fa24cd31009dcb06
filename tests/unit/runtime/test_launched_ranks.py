"""Ranks of a launcher as one group, and what a rank says that ends because another one is lost."""

import contextlib
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import RankError, run_ranks
from verl.runtime import launched_ranks
from verl.runtime.launched_ranks import LaunchedGroup, serve
from verl.trainer.run.interrupt import BeforeFirstStep
from verl.utils.errors import Interrupted


class Worker:
    """Adds its rank to what it is given."""

    def add(self, number: int) -> int:
        return number + dist.get_rank()

    def signal(self) -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def fail(self) -> None:
        if dist.get_rank() == 1:
            raise ValueError("of one rank")


def drive(folder: Path, *methods: str) -> Any:
    if dist.get_rank():
        return serve()
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    group = LaunchedGroup(Worker, folder, stall_timeout_s=0.0)
    added = group.broadcast("add", 10), group.scatter("add", list(range(dist.get_world_size())))
    with contextlib.ExitStack() as run:
        run.callback((folder / "unwound").touch)
        for method in methods:
            group.broadcast(method)
    group.close()
    return added, received


def test_all_ranks_answer_in_order_and_end_with_the_group(tmp_path: Path):
    assert run_ranks(3, drive, tmp_path) == [(([10, 11, 12], [0, 2, 4]), []), None, None]


def test_a_signal_of_another_rank_reaches_the_first_one(tmp_path: Path):
    assert run_ranks(3, drive, tmp_path, "signal")[0] == (([10, 11, 12], [0, 2, 4]), [signal.SIGTERM])


def drive_late(folder: Path, late_s: float) -> Any:
    launched_ranks.group_of_calls()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=late_s / 2))  # of collectives between ranks
    if dist.get_rank():
        return serve()
    time.sleep(late_s)  # it reads rows
    group = LaunchedGroup(Worker, folder, stall_timeout_s=0.0)
    time.sleep(late_s)  # it copies a checkpoint
    added = group.broadcast("add", 10)
    group.close()
    return added


def test_the_others_wait_for_a_call_for_as_long_as_it_takes(tmp_path: Path):
    assert run_ranks(2, drive_late, tmp_path, 3.0)[0] == [10, 11]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path):
    with pytest.raises(RankError, match=r"of one rank|lost another rank in fail"):
        run_ranks(2, drive, tmp_path, "fail")
    assert "gather_object" in (tmp_path / "rank_0_lost_rank.txt").read_text()
    assert (tmp_path / "unwound").exists()  # trackers and the progress line close


@pytest.fixture
def rank_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for reports; the process goes on, with the exit code in a SystemExit."""

    def exit_now(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(launched_ranks, "exit_now", exit_now)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return tmp_path


def test_a_rank_that_is_told_to_end_while_it_ends_for_a_lost_one_says_so(rank_zero: Path):
    with pytest.raises(Interrupted) as ended, BeforeFirstStep(), launched_ranks._ends_if_rank_lost("a.b", rank_zero):
        try:
            raise RuntimeError("[gloo] Connection closed by peer")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # from the launcher, which has seen that the other is gone
    assert ended.value.__cause__.code == 1
    report = (rank_zero / "rank_0_lost_rank.txt").read_text()
    assert report.endswith("RuntimeError: [gloo] Connection closed by peer\n") and "KeyboardInterrupt" not in report


def test_a_rank_that_is_only_told_to_end_goes_on_to_say_that(rank_zero: Path):
    with pytest.raises(Interrupted), BeforeFirstStep(), launched_ranks._ends_if_rank_lost("a.b", rank_zero):
        os.kill(os.getpid(), signal.SIGTERM)
    assert not list(rank_zero.iterdir())
