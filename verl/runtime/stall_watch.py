"""Ranks inside a call are watched from outside; when none moves, the one that the others wait for is named.

A rank moves while its CPU time or its bytes read and written grow; one that waits for its storage may rest for long.
CPU time is no move while its device stays in one collective: its library polls.
Elsewhere than on Linux nothing is watched.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from verl.runtime.device_collectives import DeviceWait, are_complete
from verl.runtime.rank import COLLECTIVE_TIMEOUT
from verl.runtime.rank_observation import TICK_S, Counters, WatchedRanks
from verl.runtime.stacks import Stack
from verl.utils.errors import WorkerError

STALL_TIMEOUT_S = 30.0  # trainer.stall_timeout_s
_IDLE_SHARE = 0.01  # of a core: less is the polling of idle threads
_STACK_CPU_S = 0.1  # more than a rank needs to write its stacks
_STORAGE_TIMEOUT_S = COLLECTIVE_TIMEOUT.total_seconds()  # for a rank that waits for its storage
_STORING = ("save", "finish_save", "load")  # methods that read and write checkpoints
_LOOK_FOR_HELPERS, _HELPERS_QUIET = 0.1, 0.8  # of the timeout: ranks quiet until helpers are watched, and those then
HELP = "docs/scale/when_a_run_hangs.md says what to look at"


class Progress:
    """For how long a process has not moved, and for how long it has been stopped, in seconds."""

    def __init__(self, counters: Counters):
        self.counters, self.state, self.quiet_s, self.stopped_s = counters, counters.state, 0.0, 0.0
        self.stores = False  # whether its stack was in an fsync or the like since its last move

    def update(self, now: Counters, elapsed_s: float) -> None:
        """Compare with the counters at the last move."""
        self.state, self.quiet_s = now.state, self.quiet_s + elapsed_s
        self.stopped_s = self.stopped_s + elapsed_s if now.state == "T" else 0.0
        used, polls = now.cpu_s - self.counters.cpu_s, self._polls(now)
        has_moved = not polls and used > max(2 * TICK_S, _IDLE_SHARE * self.quiet_s)
        has_moved = has_moved or used < 0  # one of the threads that are counted has ended
        has_moved = has_moved or now.num_bytes != self.counters.num_bytes
        has_moved = has_moved or now.storage_bytes != self.counters.storage_bytes
        if has_moved or now.state in ("t" if polls else "Rt"):  # it waits for a core, or for whoever debugs it
            self.counters, self.quiet_s, self.stores = now, 0.0, False

    def update_after_stacks(self, before: Counters, now: Counters, size: int) -> bool:
        """Whether it has moved while it wrote `size` bytes of stacks, which itself is no move."""
        polls = self._polls(now)
        has_moved = now.num_bytes - before.num_bytes not in (0, size) or now.state in ("t" if polls else "Rt")
        has_moved = has_moved or (now.cpu_s - before.cpu_s > _STACK_CPU_S and not polls)
        has_moved = has_moved or (self.stopped_s > 0 and now.state != "T")
        self.counters = now
        if has_moved:
            self.quiet_s, self.stopped_s, self.stores = 0.0, 0.0, False
        return has_moved

    def _polls(self, now: Counters) -> bool:
        """Whether its device is in the collectives in which it was at its last move."""
        return now.device_waits != () and now.device_waits == self.counters.device_waits


class StallWatch:
    """Reports the culprit, as the WorkerError to raise, once the ranks' calls have stalled.

    `open_calls()`: by rank that is inside calls, their numbers and methods. `timeout_s`: 0 watches nothing. `later_s`:
    how much later than that, where others watch the same ranks.
    """

    def __init__(
        self,
        ranks: WatchedRanks,
        num_ranks: int,
        open_calls: Callable[[], dict[int, dict[int, str]]],
        report: Callable[[WorkerError], None],
        timeout_s: float,
        later_s: float = 0.0,
    ):
        self.ranks, self.num_ranks, self.open_calls, self.report = ranks, num_ranks, open_calls, report
        self.timeout_s, self.limit_s = timeout_s, timeout_s + later_s
        self._progress: dict[int, Progress] = {}  # by rank inside a call
        self._helpers: dict[tuple[str, int], Progress] = {}  # by node and process id, once the ranks are quiet
        self._calls: dict[int, dict[int, str]] = {}
        self._ended = threading.Event()

    def start(self) -> "StallWatch":
        """Watch in a thread, where that is wanted and possible."""
        if self.timeout_s > 0 and Counters.read(os.getpid()) is not None:
            threading.Thread(target=self.watch, name="stall watch", daemon=True).start()
        return self

    def end(self) -> None:
        self._ended.set()

    def watch(self) -> None:
        """Look until the culprit is reported, or the end."""
        pause, last = min(1.0, self.timeout_s / 10), time.monotonic()
        while not self._ended.wait(pause):
            now = time.monotonic()
            elapsed, last = min(now - last, 3 * pause), now  # a driver that was itself stopped counts no time
            self._look(elapsed)
            if (error := self._find_culprit()) is not None and not self._ended.is_set():
                self.report(error)
                return

    def _look(self, elapsed_s: float) -> None:
        calls = self.open_calls()
        if (seen := self.ranks.look(calls)) is None:  # time in which a machine does not answer is not counted
            return
        before, self._calls = self._calls, calls
        progress = {}
        for rank, now in seen.items():
            known = self._progress.get(rank)
            if known is None or before.get(rank) != calls[rank]:  # it was given or has answered a call: a move
                progress[rank] = Progress(now)
            else:
                progress[rank] = known
                known.update(now, elapsed_s)
        self._progress = progress
        is_quiet = bool(progress) and min(p.quiet_s for p in progress.values()) >= _LOOK_FOR_HELPERS * self.timeout_s
        self._helpers = self._look_at_helpers(elapsed_s) if is_quiet else {}

    def _look_at_helpers(self, elapsed_s: float) -> dict[tuple[str, int], Progress]:
        """Rollout servers and other processes that a rank may wait for, by CPU time."""
        found = {}
        for helper, now in self.ranks.look_at_helpers().items():
            found[helper] = self._helpers.get(helper) or Progress(now)
            found[helper].update(now, elapsed_s if helper in self._helpers else 0.0)
        return found

    def _find_culprit(self) -> WorkerError | None:
        stopped = [rank for rank, one in self._progress.items() if one.stopped_s >= self.limit_s]
        if not stopped and not self._is_stalled():
            return None
        stacks, moved = self._ask_for_stacks(stopped)
        if not stopped and all(stack.is_idle for stack in stacks.values()):
            self._progress = {}  # their coroutines wait for the driver
            return None
        for rank, one in self._progress.items():
            one.stores = stacks[rank].is_storing and rank not in moved
        if moved.intersection(stopped or stacks) or self.open_calls() != self._calls:
            return None
        return self._name_culprit(stopped, stacks) if stopped or self._is_stalled() else None

    def _ask_for_stacks(self, stopped: Collection[int]) -> tuple[dict[int, Stack], set[int]]:
        """The stacks by rank, empty for those `stopped`, and the ranks that have moved or ended meanwhile."""
        before = self.ranks.look(self._progress) or {}
        texts = self.ranks.ask_for_stacks([rank for rank in self._progress if rank not in stopped])
        texts |= dict.fromkeys(stopped, "")
        after, moved = self.ranks.look(self._progress) or {}, set()
        for rank, progress in self._progress.items():
            then, now, size = before.get(rank), after.get(rank), len(texts[rank])
            if then is None or now is None or progress.update_after_stacks(then, now, size):
                moved.add(rank)
        waits = {rank: next(map(str, found), None) for rank, found in self._device_waits.items()}
        return {rank: replace(Stack.parse(text), on_device=waits[rank]) for rank, text in texts.items()}, moved

    @property
    def _device_waits(self) -> dict[int, tuple[DeviceWait, ...]]:
        return {rank: one.counters.device_waits for rank, one in self._progress.items()}

    def _limit_s(self, rank: int) -> float:
        """For how long a rank may rest: longer where it waits, or may wait, for its storage or for a transfer."""
        methods = {method.rpartition(".")[2] for method in self._calls[rank].values()}
        if are_complete(self._device_waits[rank], self._device_waits):
            return max(self.limit_s, _STORAGE_TIMEOUT_S)
        waits = not methods.isdisjoint(_STORING) or self._progress[rank].stores or self.ranks.wait_for_disks([rank])
        return max(self.limit_s, _STORAGE_TIMEOUT_S) if waits else self.limit_s

    def _is_stalled(self) -> bool:
        quiet = {rank: one.quiet_s for rank, one in self._progress.items()}
        if not quiet or min(quiet.values()) < self.limit_s:
            return False
        moving = [rank for rank, quiet_s in quiet.items() if quiet_s < self._limit_s(rank)]
        helping = [one for one in self._helpers.values() if one.quiet_s < _HELPERS_QUIET * self.timeout_s]
        return not moving and not helping

    def _name_culprit(self, stopped: Sequence[int], stacks: dict[int, Stack]) -> WorkerError:
        """The rank for which the others wait: one that is stopped, not in their collective, or done without it."""
        waiting = {rank: stack for rank, stack in stacks.items() if stack.waits_in and rank not in stopped}
        outside = [rank for rank in stacks if rank not in waiting and rank not in stopped]
        done = [rank for rank in range(self.num_ranks) if rank not in stacks]
        if stopped:
            rank, what = stopped[0], "it is stopped: somebody sent it SIGSTOP, and nobody SIGCONT"
        elif not any(stack.frames for stack in stacks.values()):
            rank, what = min(stacks), "no rank moves, and none says where it is: is there room for temporary files?"
        elif outside and waiting:
            rank, what = outside[0], "it has not entered the collective in which others wait"
        elif outside:
            rank, what = outside[0], "it does not move, and is in no collective"
        elif done:
            rank, what = done[0], "it has left the call without entering the collective in which others wait"
        elif len(places := Counter(stack.place for stack in stacks.values())) > 1:
            rank = min(stacks, key=lambda rank: (places[stacks[rank].place], rank))  # one of the fewest
            what = "it waits in another collective than others do"
        else:
            rank, what = min(stacks), "every rank waits in the same collective: their network does not answer"
        calls = self._calls[rank if rank in stacks else min(stacks)]
        method = calls[min(calls)]
        lines = [what, self._describe_process(rank, method)]
        if rank in stacks:
            lines.append("it cannot say at which line" if rank in stopped else f"it is at {stacks[rank].where}")
        lines += [f"rank {other} {stack.what_it_does}" for other, stack in stacks.items() if other != rank]
        if rank in stacks and stacks[rank].frames:
            lines += [f"the stack of rank {rank}, innermost first:", str(stacks[rank])]
        return WorkerError(rank, method, "\n".join([*lines, HELP]), is_stall=True)

    def _describe_process(self, rank: int, method: str) -> str:
        role, dot, _ = method.rpartition(".")
        parts = [f"role {role}"] if dot else []
        parts.append(self.ranks.describe([rank])[rank])
        if (progress := self._progress.get(rank)) is None:
            return ", ".join([*parts, "which waits for its next call"])
        wait = next((f"{one} and no bytes" for one in progress.counters.device_waits), "no CPU time and no bytes")
        still = f"{wait} for {max(progress.quiet_s, progress.stopped_s):.1f} s"
        return (
            ", ".join([*parts, f"state {progress.state}"]) + f": {still} (trainer.stall_timeout_s={self.timeout_s:g})"
        )


def describe_stuck(rank: int, stacks: str) -> str:
    """The line about a rank that was ended where it was after another had failed."""
    return f"rank {rank} {Stack.parse(stacks).what_it_does}; it was ended there"
