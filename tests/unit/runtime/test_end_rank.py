"""How a rank's process ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.conftest import ROOT
from verl.runtime.rank import RankInfo

RANK_WITH_WORK_IN_FLIGHT = """
import time, torch, torch.distributed as dist
from verl.runtime.rank import RankInfo, end_rank

rank = RankInfo.from_environment()
rank.init_process_group()
held = dist.group.WORLD
for _ in range(2000):
    if rank.rank == 1:
        dist.all_reduce(torch.ones(10), async_op=True)
    else:
        try:
            dist.all_reduce(torch.ones(10))
        except RuntimeError:  # the other one is gone
            break
        time.sleep(0.0005)
print("done")
end_rank()
"""


def test_a_rank_ends_in_success_whatever_gloo_has_still_to_give_back():
    """The interpreter's own end aborts nearly every time here: a thread of gloo wants it for a tensor."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for number in range(2):
        environment = {**os.environ, **RankInfo(number, 2, number, 2).env_variables("127.0.0.1", store.port)}
        environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        command = [sys.executable, "-c", RANK_WITH_WORK_IN_FLIGHT]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    ends = [rank.communicate(timeout=300) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert [out for out, _ in ends] == [b"done\n", b"done\n"]


PARENT = """
import subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-uc", sys.argv[1]], stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
time.sleep(600)
"""
LATER = """
import os, time
parent = os.getppid()
from verl.runtime.rank import end_with_parent
end_with_parent(parent)
print(1)
time.sleep(600)
"""
BEFORE = """
import os, time
parent = os.getppid()
print(1)
while os.getppid() == parent:
    time.sleep(0.01)
from verl.runtime.rank import end_with_parent
end_with_parent(parent)
time.sleep(600)
"""


@pytest.mark.parametrize("rank_program", [LATER, BEFORE], ids=["at work", "while it imports"])
def test_a_rank_ends_with_the_process_that_started_it(rank_program: str):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PARENT, rank_program]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    rank = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 120
    while is_running(rank) and time.monotonic() < end:
        time.sleep(0.1)
    ended = not is_running(rank)
    if not ended:
        os.kill(rank, signal.SIGKILL)
    assert ended


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
