"""Ranks that torchrun or another launcher has started: a group whose first rank drives, and computes as the others do.

They watch each other: a thread in each looks at all on its machine. The thread of the first rank names the culprit;
where that rank is stopped, or lets no thread run, that of the next one.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl.runtime.calls import GRACE_S
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.rank_observation import Counters, RankProcess, RanksOfMachine
from verl.runtime.rank_reports import LOST_RANK, RankReports, blame_earliest, folder_of_this_node
from verl.runtime.stall_watch import StallWatch
from verl.utils.errors import WorkerError
from verl.utils.process_end import exit_now

CALL_LIMIT = timedelta(days=100)  # between two calls: the first rank may read rows, or copy checkpoints, for hours
_LATER, _LATER_S = 0.1, 1.0  # of the timeout and at least: by this a rank's thread comes after that of the one before


class LaunchedGroup(WorkerGroup):
    """The workers that `factory()` builds on all ranks; made on the first one, while the others `serve`.

    A rank whose call fails raises, and ends. One that loses another says so in one line, with the traceback in a file
    in `root`; here that is a LostRankError. A signal that another rank gets is raised here after the call, as SIGTERM.
    """

    def __init__(self, factory: Callable[[], Any], root: Path, stall_timeout_s: float):
        self.layout, self.root = Layout.data_parallel(dist.get_world_size()), root
        self._is_served, self._watching = False, contextlib.ExitStack()  # whether the others wait for a call
        self.worker: Any
        with _says_lost_rank("__init__", root):
            self._send([(factory, root, stall_timeout_s)] * self.layout.world_size)
        self._watching.enter_context(_watch_each_other("fit", stall_timeout_s))
        self._reply("__init__", lambda: setattr(self, "worker", factory()))

    @property
    def local_worker(self) -> Any:
        return self.worker

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        self._is_served = False
        with _says_lost_rank(method, self.root):
            self._send([(method, args) for args in arguments])
        return self._reply(method, lambda: attrgetter(method)(self.worker)(*arguments[0]))

    def post(self, rank: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future]:
        raise NotImplementedError("ranks of a launcher are only called together")

    def close(self) -> None:
        """Let the other ranks end; after a failure they do so by themselves."""
        with self._watching:
            if self._is_served:
                self._is_served = False
                with _says_lost_rank("close", self.root):
                    self._send([None] * self.layout.world_size)

    def _send(self, messages: list[Any]) -> None:
        dist.scatter_object_list([None], messages, group=group_of_calls())

    def _reply(self, method: str, run: Callable[[], Any]) -> list[Any]:
        replies: list[Any] = [None] * self.layout.world_size
        with _says_lost_rank(method, self.root):
            dist.gather_object((run(), False), replies, group=group_of_calls())
        self._is_served = True
        if any(is_signalled for _, is_signalled in replies) and signal.getsignal(signal.SIGTERM) != signal.SIG_IGN:
            signal.raise_signal(signal.SIGTERM)  # ignored once the driver has been told
        return [result for result, _ in replies]


def serve() -> None:
    """Be a rank of the `LaunchedGroup` of the first one, until that closes it or its process is gone."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank ends the run
        signal.signal(number, lambda number, _: signals.append(number))
    with _ends_if_rank_lost("", None):  # the first rank has said why
        factory, root, stall_timeout_s = _received()
    method = "__init__"
    with _ends_if_rank_lost(lambda: method, root, signals), _watch_each_other("fit", stall_timeout_s):
        worker = factory()
        dist.gather_object((None, bool(signals)), group=group_of_calls())
        while (message := _received()) is not None:
            method, args = message
            dist.gather_object((attrgetter(method)(worker)(*args), bool(signals)), group=group_of_calls())


@cache
def group_of_calls() -> dist.ProcessGroup:
    """The process group of calls and replies; all ranks ask for it first when they have joined."""
    return dist.new_group(backend="gloo", timeout=CALL_LIMIT)


def _received() -> Any:
    message = [None]
    dist.scatter_object_list(message, group=group_of_calls())
    return message[0]


@contextlib.contextmanager
def _ends_if_rank_lost(method: Any, root: Path | None, signals: Sequence[int] = ()) -> Iterator[None]:
    """Inside the block, an error that comes from another rank's end ends this process with status 1, in one line.

    After one of `signals`, or without `root`, it ends silently. torchrun's report repeats the line, and names the rank
    that was lost.
    """
    try:
        yield
    except BaseException as error:
        if (lost := _lost_rank_in(error)) is None:
            raise
        if root is not None and not signals:
            _say_lost_rank(lost, method() if callable(method) else method, root)
        _end(128 + signals[0] if signals else 1)


@contextlib.contextmanager
def _says_lost_rank(method: str, root: Path) -> Iterator[None]:
    """Inside the block, an error that comes from another rank's end becomes a LostRankError."""
    try:
        yield
    except BaseException as error:
        if (lost := _lost_rank_in(error)) is None:
            raise
        raise LostRankError(_say_lost_rank(lost, method, root)) from error


class LostRankError(RuntimeError):
    """Another rank is gone, which is said already."""


def end_if_rank_lost(error: BaseException) -> None:
    """End this process with status 1 if `error` comes from a LostRankError; else return."""
    if any(isinstance(one, LostRankError) for one in _chain(error)):
        _end(1)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it came from."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _lost_rank_in(error: BaseException) -> BaseException | None:
    return next((e for e in _chain(error) if isinstance(e, RuntimeError) and LOST_RANK.search(str(e))), None)


def _say_lost_rank(lost: BaseException, method: str, root: Path) -> str:
    """Write the traceback to a file and the line about it to stderr; returns that line."""
    rank = dist.get_rank()
    root.mkdir(parents=True, exist_ok=True)
    file = root / f"rank_{rank}_lost_rank.txt"
    file.write_text("".join(traceback.format_exception(lost)))
    line = f"rank {rank} lost another rank in {method.rpartition('.')[2]}(): {file}"
    sys.stderr.write(f"error: {line}\n")  # in one piece: torchrun's ranks write without a buffer, side by side
    _tell_torchrun(line)
    return line


def _end(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(status)  # the interpreter's shutdown would wait for the lost rank


def _tell_torchrun(line: str) -> None:
    """Write the file from which torchrun reads why this rank failed; it takes the earliest failure for the cause."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        after_the_lost_rank_s = int(time.time()) + 2  # torchrun has seen that one by now, and counts in whole seconds
        content = {"message": line, "timestamp": after_the_lost_rank_s}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(content))


class _SomeRanks(RanksOfMachine):
    """The ranks of this machine where others have some too, for which these may wait: only a stopped one is seen."""

    def look(self, ranks: Collection[int]) -> dict[int, Counters] | None:
        return {rank: now for rank, now in (super().look(ranks) or {}).items() if now.state == "T"}


@contextlib.contextmanager
def _watch_each_other(method: str, timeout_s: float) -> Iterator[None]:
    """Inside the block, which all ranks enter together, the culprit of a stall is printed and its process killed.

    The others end because of it, or are killed too. `method` is what all ranks run.
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
    rank, everyone = dist.get_rank(), list[Any]([None]) * dist.get_world_size()
    dist.all_gather_object(everyone, (machine, os.getpid(), uncounted, uuid.uuid4().hex))
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
        ranks.kill([error.rank])  # the others hear of it in their collective
        time.sleep(GRACE_S)
        ranks.kill(processes)

    reports = RankReports(folder, rank)
    with contextlib.suppress(OSError):  # no room: without stacks
        reports.open()
    later_s = list(local).index(rank) * max(_LATER_S, _LATER * timeout_s)
    calls = {rank: {0: method} for rank in local}
    watches.append(StallWatch(ranks, len(everyone), lambda: calls, end_run, timeout_s, later_s))
    dist.barrier()  # all can say where they are
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
