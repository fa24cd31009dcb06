"""The harness for tests on several ranks."""

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks


def sum_of(values: list[float]) -> tuple[int, float, str]:
    total = torch.tensor(values[dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_rank(), float(total), os.environ["WORLD_SIZE"]


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("seven is not a colour")
    dist.barrier()


def sleep_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def crash_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


def tell(pipe: Connection) -> None:
    pipe.send((os.environ.get("A_WORD"), os.environ.get("HOME"), "torch" in sys.modules, os.getcwd()))


def test_every_rank_runs_the_function_in_one_world():
    assert run_ranks(2, sum_of, [1.0, 2.5]) == [(0, 3.5, "2"), (1, 3.5, "2")]


def test_the_traceback_of_the_rank_that_failed_is_raised():
    with pytest.raises(RankError, match=r"rank 1 failed(.|\n)*in fail_on_rank_one(.|\n)*seven is not a colour"):
        run_ranks(2, fail_on_rank_one)


def test_a_rank_that_crashes_says_by_which_signal_and_where():
    with pytest.raises(RankError, match=r"rank 1 died \(SIGABRT\)(.|\n)*in crash_on_rank_one"):
        run_ranks(2, crash_on_rank_one)


def test_ranks_that_never_end_are_reported():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not end in time"):
        run_ranks(2, sleep_on_rank_zero, timeout_s=1)


def test_processes_in_place_of_spawned_ones_are_forked_into_the_environment_and_folder_of_the_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    run_ranks(1, os.getpid)  # the server has started
    monkeypatch.setenv("A_WORD", "now")
    monkeypatch.delenv("HOME")
    monkeypatch.chdir(tmp_path)
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=tell, args=(writer,), daemon=True)
    process.start()
    assert reader.recv() == ("now", None, True, str(tmp_path))
    process.join()
