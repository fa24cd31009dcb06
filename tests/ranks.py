"""A function on N gloo ranks: `run_ranks(2, check, folder)` returns what each rank's `check(folder)` returned.

`check` is a function at the top of a test module; arguments and results must pickle. Ranks are forked from a server
that has torch, the workers and a model imported already: a spawned one computes for seconds to import them. The ranks
of a `ProcessGroup` are forked from it too, unless a test asks for the fixture `spawned_ranks`.
"""

import datetime
import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, spawn
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch.distributed.fsdp",
    "transformers.models.qwen3.modeling_qwen3",
    "verl.runtime.rank_server",
    "verl.workers.engine_worker",
    "verl.workers.engine.fsdp_engine",
]
AT_START = dict(os.environ)  # of the server, whichever test starts it
get_original_context = multiprocessing.get_context


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class Forked(SpawnContext):
    """Stands where the context "spawn" does: its processes are forked, and have the environment of this moment."""

    is_off = has_server = False

    def Process(self, target: Callable[..., None], args: tuple[Any, ...] = (), **how: Any) -> Any:  # type: ignore[override]
        ours = target.__module__.startswith(("verl.", "tests."))  # not a process of vLLM
        if self.is_off or not ours or os.fsdecode(spawn.get_executable()) != sys.executable:  # a program starts Python
            return get_original_context("spawn").Process(target=target, args=args, **how)
        return server().Process(target=_in_environment, args=(dict(os.environ), target, args), **how)


FORKED = Forked()


def get_context(method: str | None = None) -> Any:
    """`multiprocessing.get_context` in tests."""
    return FORKED if method == "spawn" else get_original_context(method)


def server(*preload: str) -> ForkServerContext:
    """The context whose server forks: started, if it was not, in the environment that pytest was started in."""
    context = get_original_context("forkserver")
    if not FORKED.has_server:
        context.set_forkserver_preload([*PRELOAD, *preload])
        now = dict(os.environ)
        try:
            _set_environment(AT_START)
            forkserver.ensure_running()
        finally:
            _set_environment(now)
        FORKED.has_server = True
    return context


def _set_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _in_environment(environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    import torch

    _set_environment(environment)
    threads = environment.get("OMP_NUM_THREADS", "")  # OpenMP has read the server's
    torch.set_num_threads(int(threads) if threads.isdigit() else os.cpu_count() or 1)
    target(*args)


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """`function(*args)` on every rank of a fresh gloo world, one thread each; results in rank order.

    Raises RankError with the traceback of the rank that failed first or crashed, or after `timeout_s` without an end.
    """
    context = server(function.__module__)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            settings = (rank, world_size, Path(folder), timeout_s, dict(os.environ))
            process = context.Process(target=_rank, args=(sender, settings, function, args), daemon=True)
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        except EOFError as error:
            rank = error.args[0]
            processes[rank].join()
            raise RankError(_how_it_died(rank, processes[rank].exitcode, Path(folder))) from None
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures = list[tuple[float, int, str]]()
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        # a rank that has crashed is why the others failed, whoever is heard first
        ready = wait(waiting, timeout=1.0 if failures else max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise RankError(f"ranks {[r for r in range(len(pipes)) if r not in results]} did not end in time")
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, stamp, value = pipe.recv()
            except EOFError:
                raise EOFError(rank) from None
            results[rank] = value
            if failed:
                failures.append((stamp, rank, value))
    if failures:
        _, rank, text = min(failures)
        raise RankError(f"rank {rank} failed:\n{text}")
    return [results[rank] for rank in range(len(pipes))]


def _how_it_died(rank: int, exitcode: int | None, folder: Path) -> str:
    how = signal.Signals(-exitcode).name if exitcode and exitcode < 0 else f"exit status {exitcode}"
    return f"rank {rank} died ({how}):\n{(folder / f'crash_{rank}').read_text() or 'without a word'}"


def _rank(pipe: Connection, settings: tuple, function: Callable[..., Any], args: tuple) -> None:
    rank, world_size, folder, timeout_s, environment = settings
    faulthandler.enable(open(folder / f"crash_{rank}", "w"))  # noqa: SIM115  # open as long as this process
    _set_environment(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'store'}",
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
