"""The processes of ranks, looked at from outside through Linux's /proc: what they have done, and where they are."""

import contextlib
import os
import shutil
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl.runtime.device_collectives import DeviceWait, read_device_waits
from verl.runtime.rank_reports import RecordedError, ask_for_stacks, read_errors

_PROC = Path("/proc")
TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


@dataclass(frozen=True)
class Counters:
    """Counters of a process, or of some of its threads."""

    state: str  # of the thread that runs calls: R running, S sleeping, D waiting for a disk, T stopped, t in a debugger
    cpu_s: float
    num_bytes: int  # of its calls to read and write, also from the page cache; those of sockets are not known
    parent: int
    storage_bytes: int = 0  # that a disk has read and written for it
    device_waits: tuple[DeviceWait, ...] = ()  # of a library that polls, which is CPU time without a move

    def without(self, threads: Collection["Counters"]) -> "Counters":
        """The counters without those of some of its threads."""
        return replace(self, **{name: getattr(self, name) - value for name, value in _sums(threads).items()})

    @classmethod
    def read(cls, process: int) -> "Counters | None":
        """None where the process has ended or cannot be looked at."""
        return cls._of(_PROC / str(process))

    @classmethod
    def _of(cls, folder: Path) -> "Counters | None":
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        try:
            lines = (folder / "io").read_text().splitlines()
            io = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        except OSError:  # a container that hides it
            io = dict.fromkeys(("rchar", "wchar", "read_bytes", "write_bytes"), 0)
        cpu_s, storage_bytes = (int(fields[11]) + int(fields[12])) * TICK_S, io["read_bytes"] + io["write_bytes"]
        return cls(fields[0], cpu_s, io["rchar"] + io["wchar"], int(fields[1]), storage_bytes)


def _sums(threads: Collection[Counters]) -> dict[str, Any]:
    return {name: sum(getattr(one, name) for one in threads) for name in ("cpu_s", "num_bytes", "storage_bytes")}


@dataclass(frozen=True)
class RankProcess:
    """Where a rank runs: its process, the thread of its calls (None: the main one), and threads that do not count."""

    process: int
    thread: int | None = None
    others: frozenset[int] = frozenset()  # those of Ray, which are never quiet, or that watch

    def counters(self) -> Counters | None:
        """None where it has ended."""
        folder = _PROC / str(self.process) / "task"
        if self.thread is None:
            whole, others = Counters.read(self.process), [Counters._of(folder / str(n)) for n in self.others]
            return whole and whole.without([one for one in others if one is not None])
        tasks = {int(path.name): path for path in folder.glob("[0-9]*")}
        found = {n: Counters._of(path) for n, path in tasks.items() if n not in self.others}
        calls, counted = found.get(self.thread), [one for one in found.values() if one is not None]
        if calls is None:
            return None
        return replace(calls, **_sums(counted))


def waits_for_disk(process: int) -> bool:
    """Whether a thread of it is in state D, as in a read or an fsync that a disk or a server has not answered."""
    for thread in (_PROC / str(process) / "task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if thread.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False


def threads_of_this_process() -> set[int]:
    """Their ids; none where the system does not tell."""
    return {int(path.name) for path in (_PROC / "self" / "task").glob("[0-9]*")}


class WatchedRanks(ABC):
    """The processes of a group's ranks, wherever they are."""

    @abstractmethod
    def look(self, ranks: Collection[int]) -> dict[int, Counters] | None:
        """Counters of each rank that has not ended; None while a machine does not answer."""

    @abstractmethod
    def look_at_helpers(self) -> dict[tuple[str, int], Counters]:
        """The CPU time of rollout servers and other processes that a rank may wait for, by node and process id."""

    @abstractmethod
    def ask_for_stacks(self, ranks: Collection[int]) -> dict[int, str]:
        """The stacks of each rank's threads; "" where it does not report them."""

    @abstractmethod
    def wait_for_disks(self, ranks: Collection[int]) -> set[int]:
        """The ranks of which a thread waits for a disk."""

    @abstractmethod
    def describe(self, ranks: Collection[int]) -> dict[int, str]:
        """Node and process of each rank."""


class RanksOfMachine(WatchedRanks):
    """The ranks of one machine, which write their stacks and errors to `folder`.

    Their helpers are what the processes `parents` have started.
    """

    def __init__(self, processes: dict[int, RankProcess], folder: Path, parents: Collection[int]):
        self.processes, self.folder, self.parents = processes, folder, set(parents)

    def look(self, ranks: Collection[int]) -> dict[int, Counters] | None:
        found = {}
        for rank in ranks:
            if (now := self.processes[rank].counters()) is not None:
                waits = () if now.state == "T" else read_device_waits(self.folder, rank)
                found[rank] = replace(now, device_waits=waits)
        return found

    def look_at_helpers(self) -> dict[tuple[str, int], Counters]:
        own = {place.process for place in self.processes.values()}
        return {item: one for item, one in helpers_of(self.parents).items() if item[1] not in own}

    def ask_for_stacks(self, ranks: Collection[int]) -> dict[int, str]:
        return ask_for_stacks(self.folder, {rank: self.processes[rank].process for rank in ranks})

    def wait_for_disks(self, ranks: Collection[int]) -> set[int]:
        return {rank for rank in ranks if waits_for_disk(self.processes[rank].process)}

    def describe(self, ranks: Collection[int]) -> dict[int, str]:
        node = socket.gethostname()
        return {rank: f"node {node}, process {self.processes[rank].process}" for rank in ranks}

    def read_errors(self) -> list[RecordedError]:
        """The errors that these ranks have recorded, in order of time."""
        return read_errors(self.folder)

    def remove_reports(self) -> None:
        """Delete their files, once they have ended."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self, ranks: Collection[int] | None = None) -> None:
        """End these ranks (None: all), also those that are stopped."""
        for rank in self.processes if ranks is None else ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].process, signal.SIGKILL)


def family(ancestors: Collection[int], without: str = "") -> dict[int, Counters]:
    """The counters of these processes and of all below them, by process id.

    Without those, and what is below them, whose command line has `without`.
    """
    known = {int(path.name): Counters.read(int(path.name)) for path in _PROC.glob("[0-9]*")}
    living = {process: now for process, now in known.items() if now is not None}
    members, size = set(ancestors), -1
    while len(members) > size:
        size = len(members)
        new = {process for process, now in living.items() if now.parent in members and process not in members}
        members |= {process for process in new if not (without and without in _command(process))}
    return {process: living[process] for process in members & living.keys()}


def helpers_of(parents: Collection[int], without: str = "") -> dict[tuple[str, int], Counters]:
    """The CPU time of all processes below `parents`, by node and process id."""
    found, node = family(parents, without), socket.gethostname()
    return {(node, n): replace(found[n], num_bytes=0, storage_bytes=0) for n in found.keys() - set(parents)}


def _command(process: int) -> str:
    try:
        return (_PROC / str(process) / "cmdline").read_text(errors="replace")
    except OSError:
        return ""
