"""A function on N gloo ranks: `run_ranks(2, check, folder)` returns what each rank's `check(folder)` returned.

`check` is a function at the top of a test module; arguments and results must pickle. Ranks are forked from a server
that has torch and the engine imported already, so a spawn takes well under a second after the first.
"""

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = ["torch.distributed.fsdp", "verl.workers.engine.fsdp_engine"]


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """`function(*args)` on every rank of a fresh gloo world, one thread each; results in rank order.

    Raises RankError with the traceback of the rank that failed first, or after `timeout_s` without an end.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, function.__module__])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            settings = (rank, world_size, str(Path(folder) / "store"), timeout_s, dict(os.environ))
            process = context.Process(target=_rank, args=(sender, settings, function, args), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {[r for r in range(len(pipes)) if r not in results]} did not end in time")
        failures = []
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, stamp, value = pipe.recv()
            except EOFError:
                raise RankError(f"rank {rank} died without a word") from None
            results[rank] = value
            if failed:
                failures.append((stamp, rank, value))
        if failures:
            _, rank, text = min(failures)
            raise RankError(f"rank {rank} failed:\n{text}")
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, settings: tuple, function: Callable[..., Any], args: tuple) -> None:
    rank, world_size, store, timeout_s, environment = settings
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s + 60),  # it is `run_ranks` that says who did not end
        )
        value = function(*args)
        dist.barrier()
        pipe.send((False, time.monotonic(), value))
    except BaseException:
        pipe.send((True, time.monotonic(), traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)  # tearing down gloo after a failure can hang
