"""Workers for tests of worker groups: at module level, so that processes can import them."""

import asyncio
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from verl.data.batch import Batch
from verl.runtime.group import RankPlace
from verl.utils.errors import ConfigError


class Counter:
    def __init__(self) -> None:
        self.reset()

    def add(self, number: int, times: int = 1) -> int:
        self.total += number * times
        return self.total

    def reset(self) -> None:
        self.total = self.at_gate = 0
        self.gate_is_open = False
        self.numbers: list[int] = []

    def remember(self, number: int, batch: Batch) -> None:
        self.numbers.append(number)

    def remembered(self) -> list[int]:
        return self.numbers

    def fail(self) -> None:
        raise LookupError("broken on purpose")

    def refuse(self) -> None:
        raise ConfigError("the key is wrong")

    def twice(self, batch: Batch) -> dict[str, torch.Tensor]:
        return {"tokens": batch["tokens"] * 2, "half": batch["half"] * 2}

    def closure(self) -> object:
        return lambda: None

    def rank(self) -> int:
        return dist.get_rank()

    def process(self) -> int:
        return os.getpid()

    def threads(self) -> int:
        return torch.get_num_threads()

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def sum_over_ranks(self, number: float) -> float:
        total = torch.tensor(number)
        dist.all_reduce(total)
        return total.item()

    def fail_on(self, rank: int) -> float:
        if dist.get_rank() == rank:
            raise LookupError(f"only rank {rank}")
        return self.sum_over_ranks(1.0)  # waits for the rank that failed

    def die_on(self, rank: int) -> float:
        if dist.get_rank() == rank:
            os.write(2, b"about to go\n")
            os.kill(os.getpid(), signal.SIGKILL)
        return self.sum_over_ranks(1.0)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def pass_gate(self) -> int:
        self.at_gate += 1
        while not self.gate_is_open:
            await asyncio.sleep(0.001)
        return self.at_gate

    def number_at_gate(self) -> int:
        return self.at_gate

    def open_gate(self) -> None:
        self.gate_is_open = True


class Reader(Counter):
    """Says where the numbers of a batch lie, and for how long they stay as they are."""

    def keep(self, batch: Batch) -> bool:
        self.batch = batch
        data = batch["tokens"].data_ptr()
        with open("/proc/self/maps") as maps:
            ranges = [line.split() for line in maps if "/dev/shm" in line or "plasma" in line]
        return any(int(start, 16) <= data < int(end, 16) for start, _, end in (r[0].partition("-") for r in ranges))

    def sum_kept(self) -> int:
        return int(self.batch["tokens"].sum())


class Keeper(Counter):
    """Keeps every batch, and with it what lies in an object store."""

    def keep(self, batch: Batch) -> None:
        self.kept = [*getattr(self, "kept", ()), batch["tokens"]]

    def sums(self) -> list[int]:
        return [int(tokens.sum()) for tokens in self.kept]


class Placed(Counter):
    """Part of a worker: its ranks are one data-parallel group, whose last rank returns the outputs."""

    def place(self) -> RankPlace:
        is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        return RankPlace(0, returns_outputs=is_last)

    def rank_and_shard(self, shard: int) -> tuple[int, int]:
        return (dist.get_rank() if dist.is_initialized() else 0, shard)


class Holder:
    def __init__(self) -> None:
        self.counter = Placed()

    def local_rank(self) -> str:
        print("at work", file=sys.stderr, flush=True)
        return os.environ.get("LOCAL_RANK", "inline")


class Broken:
    def __init__(self) -> None:
        raise LookupError("cannot be built")


class BrokenOnOne:
    def __init__(self) -> None:
        if dist.get_rank() == 1:
            raise LookupError("cannot be built here")
        time.sleep(1.0)
