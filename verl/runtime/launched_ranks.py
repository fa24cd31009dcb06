"""Ranks that torchrun or another launcher has started watch each other: a thread in each looks at all on its machine.

The thread of the first rank names the culprit; where that rank is stopped, or lets no thread run, that of the next one.
"""

import contextlib
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from verl.runtime.calls import GRACE_S
from verl.runtime.collectives import Collectives
from verl.runtime.rank_processes import Counters, RankProcess, RanksOfMachine
from verl.runtime.rank_reports import RankReports, blame_earliest, folder_of_this_node
from verl.runtime.stall_watch import StallWatch
from verl.utils.errors import WorkerError

_LATER, _LATER_S = 0.1, 1.0  # of the timeout and at least: by this a rank's thread comes after that of the one before


class _SomeRanks(RanksOfMachine):
    """The ranks of this machine where others have some too, for which these may wait: only a stopped one is seen."""

    def look(self, ranks: Collection[int]) -> dict[int, Counters] | None:
        return {rank: now for rank, now in (super().look(ranks) or {}).items() if now.state == "T"}


@contextlib.contextmanager
def watch_each_other(
    collectives: Collectives, method: str, timeout_s: float, said: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Inside the block, which all ranks enter together, the culprit of a stall is printed and its process killed.

    The others end because of it, or are killed too. `method` is what all ranks run; `said()` is called after printing.
    """
    if timeout_s <= 0 or (machine := _this_machine()) is None:
        yield
        return
    may_look = threading.Event()
    watches: list[StallWatch] = []

    def look() -> None:
        may_look.wait()
        watches[0].watch()

    thread = threading.Thread(target=look, name="stall watch", daemon=True)
    thread.start()
    # threads that are there already, as that of the progress line, say nothing of what the rank does
    uncounted = [one.native_id or 0 for one in threading.enumerate() if one is not threading.main_thread()]
    everyone = collectives.all_gather((machine, os.getpid(), uncounted, uuid.uuid4().hex))
    folder, since = folder_of_this_node(f"verl-ranks-{everyone[0][3]}"), time.time()
    local = {rank: one for rank, one in enumerate(everyone) if one[0] == machine}
    processes = {rank: RankProcess(process, None, frozenset(own)) for rank, (_, process, own, _) in local.items()}
    kind = RanksOfMachine if len(local) == len(everyone) else _SomeRanks
    ranks = kind(processes, folder, [process.process for process in processes.values()])

    def end_run(error: WorkerError) -> None:
        try:
            (folder / "said").touch(exist_ok=False)
            error = blame_earliest(error, since, ranks.read_errors())
        except (FileExistsError, FileNotFoundError):  # another rank has said it, or the ranks end
            return
        except OSError:  # no room: several may say it
            pass
        print(f"error: {error}", file=sys.stderr, flush=True)
        said()
        ranks.kill([error.rank])  # the others hear of it in their collective
        time.sleep(GRACE_S)
        ranks.kill(processes)

    reports = RankReports(folder, collectives.rank)
    with contextlib.suppress(OSError):  # no room: without stacks
        reports.open()
    later_s = list(local).index(collectives.rank) * max(_LATER_S, _LATER * timeout_s)
    calls = {rank: {0: method} for rank in local}
    watches.append(StallWatch(ranks, len(everyone), lambda: calls, end_run, timeout_s, later_s))
    collectives.all_gather(None)  # all can say where they are
    may_look.set()
    try:
        yield
    finally:
        watches[0].end()
        reports.remove()


def _this_machine() -> str | None:
    """A name that processes share if they see each other; None where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
