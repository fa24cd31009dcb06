"""A process's rank in a job, and how it joins the process group: under torchrun, or started by a driver."""

import os
import socket
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from verl.plugin.platform import get_platform
from verl.runtime.version_consistency import check_ranks
from verl.utils.cores import num_cores
from verl.utils.errors import ConfigError, WorkerError
from verl.utils.process_end import end_without_freeing_objects, exit_now

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # how long a rank waits for the others inside one collective
JOIN_TIMEOUT = timedelta(minutes=10)  # how long a rank waits until all others have started
_TAKEN = "another program listens there; set MASTER_PORT to a free port on all ranks"


@dataclass(frozen=True)
class RankInfo:
    """This process's rank and the number of ranks, in the job and on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "RankInfo":
        """From the variables that torchrun (or srun) sets; a single rank without WORLD_SIZE."""
        if "WORLD_SIZE" not in os.environ:
            return cls()
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set but {', '.join(missing)} is not; start the ranks with "
                "torchrun, or unset WORLD_SIZE for one process"
            )
        world_size = int(os.environ["WORLD_SIZE"])
        rank, local_world_size = int(os.environ["RANK"]), int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        local_rank = int(os.environ.get("LOCAL_RANK", rank % local_world_size))
        return cls(rank, world_size, local_rank, local_world_size)

    def env_variables(self, address: str, port: int) -> dict[str, str]:
        """The variables that torchrun would set."""
        numbers = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_PORT": port,
        }
        return {"MASTER_ADDR": address, **{name: str(number) for name, number in numbers.items()}}

    def init_process_group(self, store: dist.Store | None = None) -> bool:
        """Set this rank's device and share of the cores, then join the process group (`store`, or MASTER_ADDR).

        False where it had joined already.
        """
        # names that torch is about to change, in its own code too: nobody who runs this can act on it
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        platform = get_platform()
        if platform.device_name != "cpu":
            platform.set_device(self.local_rank % platform.device_count())
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, num_cores() // self.local_world_size))
        if dist.is_initialized():
            return False
        dist.init_process_group(
            process_group_backend(),
            rank=self.rank,
            world_size=self.world_size,
            store=store or self._store_at_master(),
            timeout=COLLECTIVE_TIMEOUT,
        )
        return True

    def _store_at_master(self) -> dist.Store:
        """The store at MASTER_ADDR, once all ranks have joined it and have found their versions to be the same.

        WorkerError says what keeps this rank from it.
        """
        place = f"MASTER_ADDR={os.environ['MASTER_ADDR']}, MASTER_PORT={os.environ['MASTER_PORT']}"
        waited_s = JOIN_TIMEOUT.total_seconds()
        silent = threading.Timer(waited_s + 5.0, _end_unanswered, [self.rank, place, waited_s])
        silent.daemon = True
        silent.start()
        try:
            store, _, _ = next(dist.rendezvous("env://", self.rank, self.world_size, timeout=JOIN_TIMEOUT))
        except dist.DistError as error:
            text = str(error).strip().partition("\n")[0].rstrip(".")
            if "EADDRINUSE" in text:
                what = f"rank 0 cannot listen at {place}: {_TAKEN}"
            elif self.rank == 0:
                what = f"not all of the {self.world_size} ranks of WORLD_SIZE came to {place} within {waited_s:g} s: "
                what += f"{text}; look at what the others have printed, and whether their network reaches that address"
            else:
                what = _no_answer(place, waited_s, text)
            raise WorkerError(self.rank, "init_process_group", what) from error
        finally:
            silent.cancel()
        check_ranks(dist.PrefixStore("versions", store), self.rank, self.world_size)
        store.set_timeout(COLLECTIVE_TIMEOUT)
        return dist.PrefixStore("default_pg", store)


def _no_answer(place: str, waited_s: float, text: str) -> str:
    return (
        f"rank 0 did not answer at {place} within {waited_s:g} s: {text}; look at what rank 0 has printed, and whether "
        "this machine's network reaches that address"
    )


def _end_unanswered(rank: int, place: str, waited_s: float) -> None:
    """End this process, whose main thread still waits: for a server that says nothing, or to try once more."""
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5.0).close()
        what = f"no rank 0 at {place}; {_TAKEN}"
    except OSError as error:
        what = _no_answer(place, waited_s, str(error))
    print(f"error: rank {rank}: {what}", file=sys.stderr, flush=True)
    exit_now(1)


def end_with_parent(parent: int) -> None:
    """End this process once `parent`, the process that started it, has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        exit_now(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_rank(exit_code: int = 0) -> NoReturn:
    """End the process of a finished rank, without the interpreter's shutdown.

    torch's caches keep process groups alive after their destruction, and with them gloo's threads. Before Python 3.14,
    a gloo thread that frees the tensors of a collective during the shutdown aborts the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    end_without_freeing_objects(exit_code)


def process_group_backend() -> str:
    """gloo for CPU tensors, the platform's own backend for tensors on its device."""
    platform = get_platform()
    device_backend = platform.communication_backend_name()
    return "gloo" if platform.device_name == "cpu" else f"cpu:gloo,{platform.device_name}:{device_backend}"
