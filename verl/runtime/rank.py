"""One process's place among the ranks of a job, and how it joins them: under torchrun, or started by a driver."""

import atexit
import os
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # how long a rank waits for the others inside one collective


@dataclass(frozen=True)
class RankInfo:
    """Which rank this is, on its machine and in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "RankInfo":
        """What torchrun (or srun with the same variables) says; one rank of one where it says nothing."""
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

    def init_process_group(self, store: dist.Store | None = None) -> None:
        """Take this rank's device and share of the cores, then meet the others (through `store`, or MASTER_ADDR)."""
        platform = get_platform()
        if platform.device_name != "cpu":
            platform.set_device(self.local_rank % platform.device_count())
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, num_cores() // self.local_world_size))
        if not dist.is_initialized():
            dist.init_process_group(
                process_group_backend(),
                rank=self.rank,
                world_size=self.world_size,
                store=store,
                timeout=COLLECTIVE_TIMEOUT,
            )


def end_with_parent(parent: int) -> None:
    """From now on this process ends when `parent` has, the one that started it, which would have ended it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def end_rank() -> NoReturn:
    """End the process of a rank whose work is done, with exit code 0 and without the interpreter's own end.

    torch's caches hold process groups beyond their destruction, and with them gloo's threads: before Python 3.14, one
    that gives back the tensors of a collective while the interpreter ends aborts the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # as multiprocessing does where it forks
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def process_group_backend() -> str:
    """gloo for tensors on the CPU, the platform's own for those on its device."""
    platform = get_platform()
    own = platform.communication_backend_name()
    return "gloo" if platform.device_name == "cpu" else f"cpu:gloo,{platform.device_name}:{own}"


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
