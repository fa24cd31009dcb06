"""The injections of the soak of failures into groups of ranks: stalls, and ranks that do not find each other."""

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import torch
import torch.distributed as dist

from scripts.soak.injections import RUN_LIMIT_S, STALL_S, Inject, Wrong, expect
from scripts.soak.progress import ROOT
from tests.contract.test_stalled_ranks import Worker
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup
from verl.utils.errors import WorkerError

RANKS = 3


class SoakWorker(Worker):
    """Methods of which one rank, the culprit, does something else than the others."""

    def skip(self, culprit: int, step: int, how: str) -> float:
        """The culprit does not enter collective number `step`."""
        for number in range(step + 1):
            if dist.get_rank() == culprit and number == step:
                getattr(self, how)()
            else:
                self.sum_over_ranks(1.0)
        return self.sum_over_ranks(1.0) if how != "leave_early" else 0.0

    def sleep_for_ever(self) -> None:
        time.sleep(3600.0)

    def wait_for_a_lock(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def wait_for_a_client(self) -> None:
        socket.create_server(("127.0.0.1", 0)).accept()

    def leave_early(self) -> None:
        pass

    def uneven(self, culprit: int, counts: tuple[int, int], meet: bool) -> float:
        """The culprit has another number of micro-batches, after each of which all reduce the gradient."""
        for _ in range(counts[dist.get_rank() == culprit]):
            self.sum_over_ranks(1.0)
        if meet:
            dist.barrier()
        return 0.0

    def starve(self, culprit: int, step: int, dies: bool) -> float:
        """The thread that fills the culprit's queue ends after `step` items, by an error or without a word."""
        items: queue.Queue[int] = queue.Queue(1)

        def fill() -> None:
            for number in range(step if dist.get_rank() == culprit else step + 3):
                items.put(number)
            if dies and dist.get_rank() == culprit:
                raise LookupError("no more rows")

        threading.Thread(target=fill, name="loader", daemon=True).start()
        for _ in range(step + 3):
            self.take(items)
            self.sum_over_ranks(1.0)
        return 0.0

    def take(self, items: queue.Queue[int]) -> int:
        return items.get()

    def compile(self, seconds: float) -> float:
        """Rank 1 compiles one function after the other."""
        end, number = time.monotonic() + seconds, 0
        while dist.get_rank() == 1 and time.monotonic() < end:
            number += 1
            torch.compile(lambda x, n=number: (x * n).sin().sum() + n, dynamic=False)(torch.ones(64 + number))
            torch._dynamo.reset()
        return self.sum_over_ranks(1.0)

    def load_models(self, seconds: float, folder: str) -> float:
        """Rank 1 loads a model again and again."""
        from transformers import AutoModelForCausalLM

        end = time.monotonic() + seconds
        while dist.get_rank() == 1 and time.monotonic() < end:
            AutoModelForCausalLM.from_pretrained(folder)
        return self.sum_over_ranks(1.0)


def failure(method: str, *arguments: object) -> str:
    """What is said of a call of `RANKS` ranks that fails; all ranks have ended by then."""
    group = ProcessGroup(SoakWorker, Layout.data_parallel(RANKS), stall_timeout_s=STALL_S)
    try:
        group.broadcast(method, *arguments)
    except WorkerError as error:
        alive = [process for process in group._processes if process.join(30) or process.exitcode is None]
        return f"error: {error}" + "".join(f"\nstill there: {process}" for process in alive)
    finally:
        group.close()
    raise Wrong(f"{method}{arguments} ended without an error")


@contextmanager
def skipped_collective() -> Iterator[Inject]:
    def inject(draw: Random) -> str:
        culprit, step = draw.randrange(RANKS), draw.randrange(4)
        how = draw.choice(["sleep_for_ever", "wait_for_a_lock", "wait_for_a_client", "leave_early"])
        said = failure("skip", culprit, step, how)
        entered_not = f"(?s)has not entered.*in {how}\\(\\): "
        what = "has left the call without entering" if how == "leave_early" else entered_not
        return expect(said, f"^error: rank {culprit} failed in skip", what, "waits in all_reduce", never="still there")

    yield inject


@contextmanager
def uneven_micro_batches() -> Iterator[Inject]:
    def inject(draw: Random) -> str:
        culprit, meet, many = draw.randrange(RANKS), draw.random() < 0.5, draw.randrange(2, 6)
        said = failure("uneven", culprit, (many, many - 1), meet)
        what = "it waits in another collective" if meet else "it has left the call without entering"
        at = "in uneven\\(\\): dist.barrier\\(\\)" if meet else "dist.all_reduce\\(total\\)"
        return expect(said, f"^error: rank {culprit} failed in uneven", what, at, never="still there")

    yield inject


@contextmanager
def starved_queue() -> Iterator[Inject]:
    def inject(draw: Random) -> str:
        culprit, dies = draw.randrange(RANKS), draw.random() < 0.5
        said = failure("starve", culprit, draw.randrange(4), dies)
        cause = "LookupError: no more rows\n.*" if dies else ""
        at = f"(?s){cause}has not entered.*in take\\(\\): return items.get\\(\\)"
        return expect(said, f"^error: rank {culprit} failed in ", at, never="still there")

    yield inject


JOIN = """
import sys
from verl.runtime import rank
from verl.utils.errors import VerlError
rank.JOIN_TIMEOUT *= {seconds} / 600
try:
    rank.RankInfo.from_environment().init_process_group()
except VerlError as error:
    sys.exit(f"error: {{error}}")
"""
JOIN_S = 15.0
UNREACHED = ["198.51.100.7", "203.0.113.9"]  # of networks that are for documentation: nobody is there


def join(ranks: int, port: int, addresses: dict[int, str]) -> dict[int, str]:
    """By rank, what it says that it was told to find rank 0 at `addresses`, or on this machine."""
    processes = {}
    for rank in range(ranks):
        variables = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": addresses.get(rank, "127.0.0.1")}
        words = {name: str(value) for name, value in {**variables, "MASTER_PORT": port}.items()}
        environment = {**os.environ, **words, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-c", JOIN.format(seconds=JOIN_S)]
        processes[rank] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    try:
        return {rank: process.communicate(timeout=RUN_LIMIT_S)[0] for rank, process in processes.items()}
    finally:
        for process in processes.values():
            process.kill()


@contextmanager
def address_in_use() -> Iterator[Inject]:
    def inject(draw: Random) -> str:
        with socket.create_server(("", 0)) as other:
            said = join(draw.choice([2, 3]), port := int(other.getsockname()[1]), {})
        place = f"at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"
        expect(said[0], f"error: rank 0 failed.*\n?.*rank 0 cannot listen {place}: another program listens there")
        for rank in range(1, len(said)):
            expect(said[rank], f"rank {rank}.*\n?.*(no rank 0|rank 0 did not answer) {place}")
        return "\n".join(said.values())

    yield inject


@contextmanager
def separate_networks() -> Iterator[Inject]:
    def inject(draw: Random) -> str:
        with socket.create_server(("", 0)) as free:
            port = int(free.getsockname()[1])
        ranks, address = draw.choice([2, 3]), draw.choice(UNREACHED)
        apart = draw.randrange(1, ranks)
        said = join(ranks, port, {apart: address})
        place = f"at MASTER_ADDR={address}, MASTER_PORT={port}"
        expect(said[apart], f"error: rank {apart}.*\n?.*rank 0 did not answer {place}", never="another program")
        expect(said[apart], "whether this machine's network reaches that address")
        expect(said[0], f"not all of the {ranks} ranks of WORLD_SIZE came to .*{ranks - 1}/{ranks} clients joined")
        return "\n".join(said.values())

    yield inject
