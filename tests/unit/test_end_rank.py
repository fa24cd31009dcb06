"""How a rank's process ends."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import ROOT
from verl.runtime.torchrun import Rank

RANK_WITH_WORK_IN_FLIGHT = """
import time, torch, torch.distributed as dist
from verl.runtime.torchrun import Rank, end_rank

rank = Rank.of_environment()
rank.join()
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
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = []
    for number in range(2):
        environment = {**os.environ, **Rank(number, 2, number, 2).environment("127.0.0.1", port)}
        environment.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        command = [sys.executable, "-c", RANK_WITH_WORK_IN_FLIGHT]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    ends = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], ends
    assert [out for out, _ in ends] == [b"done\n", b"done\n"]


PARENT = """
import subprocess, sys, time
child = "import time; from verl.runtime.torchrun import end_with_parent; end_with_parent(); print(1); time.sleep(60)"
rank = subprocess.Popen([sys.executable, "-uc", child], stdout=subprocess.PIPE)
rank.stdout.readline()
print(rank.pid, flush=True)
time.sleep(60)
"""


def test_a_rank_ends_with_the_process_that_started_it():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    rank = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    end = time.monotonic() + 30
    while is_running(rank) and time.monotonic() < end:
        time.sleep(0.1)
    assert not is_running(rank)


def is_running(process: int) -> bool:
    status = Path(f"/proc/{process}/status")
    return status.exists() and "State:\tZ" not in status.read_text()
