"""How a rank's process ends."""

import os
import socket
import subprocess
import sys

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
