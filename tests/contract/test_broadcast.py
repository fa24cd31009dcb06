"""Broadcasts among many workers, where the slow ones get what they need from other workers."""

import threading
import time

import torch
from torch import Tensor

from verl.checkpoint_engine.broadcast import GlooTransport
from verl.checkpoint_engine.buckets import buckets

RECEIVERS = 7  # the last one is three hops from the sender
SENT = [(str(number), torch.randn(400)) for number in range(24)]


def test_a_worker_that_is_slow_finds_every_message():
    ends = [GlooTransport(4000, timeout=30) for _ in range(1 + RECEIVERS)]
    fact = ends[0].prepare()
    arrived: dict[int, list[tuple[str, Tensor]]] = {rank: [] for rank in range(1, len(ends))}
    all_have_it = threading.Barrier(len(ends))  # as the driver waits before it begins the next publish

    def receive(rank: int) -> None:
        ends[rank].init_process_group(rank, **fact, size=len(ends))
        for version in range(2):
            for bucket in ends[rank].receive_buckets(version):
                arrived[rank] += bucket
                if rank == RECEIVERS:
                    time.sleep(0.05)
            all_have_it.wait(60)

    threads = [threading.Thread(target=receive, args=(rank,), daemon=True) for rank in arrived]
    for thread in threads:
        thread.start()
    sender = ends[0]
    sender.init_process_group(0, **fact, size=len(ends))
    for version in range(2):
        for _ in sender.send_buckets(buckets(SENT, 2000), None, version):
            pass
        all_have_it.wait(60)
    assert sender.num_messages - sender.num_deleted == 1 + len(SENT)  # the store holds no more than one publish
    for tensors in arrived.values():
        assert [name for name, _ in tensors] == [name for name, _ in SENT * 2]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tensors, SENT * 2, strict=True))
    for thread in threads:
        thread.join()
    for end in ends:
        end.finalize()
