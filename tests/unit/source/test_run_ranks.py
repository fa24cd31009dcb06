"""The harness for tests on several ranks."""

import os
import time

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


def test_every_rank_runs_the_function_in_one_world():
    assert run_ranks(2, sum_of, [1.0, 2.5]) == [(0, 3.5, "2"), (1, 3.5, "2")]


def test_the_traceback_of_the_rank_that_failed_is_raised():
    with pytest.raises(RankError, match=r"rank 1 failed(.|\n)*in fail_on_rank_one(.|\n)*seven is not a colour"):
        run_ranks(2, fail_on_rank_one)


def test_ranks_that_never_end_are_reported():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] did not end in time"):
        run_ranks(2, sleep_on_rank_zero, timeout_s=1)
