"""Files that ranks leave for their driver: each exception with its time, and on a signal where their threads are."""

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from verl.utils.errors import VerlError, WorkerError

STACK_SIGNAL = getattr(signal, "SIGUSR1", None)  # None where faulthandler takes no signals
LOST_RANK = re.compile(
    r"Connection (reset|closed|refused)|Broken pipe|gloo/transport|ncclRemoteError|remote process exited", re.IGNORECASE
)
_WRITING = threading.Lock()  # held by the thread that writes this process's errors
_KEPT_ERRORS = 16  # of one rank, the newest
_HEARD_WITHIN_S = 5.0  # the driver hears of a death this late at most
_STACK_LIMIT_S, _SETTLED_S = 10.0, 0.2  # to wait for a stack, and how long one that is complete has not grown


@dataclass(frozen=True)
class RecordedError:
    """An exception of a rank, or the end of its process."""

    time: float  # seconds since 1970
    rank: int
    method: str  # the call
    text: str  # its message or traceback
    in_call: bool = True  # False: of another thread, or one that ended the process
    is_death: bool = False  # True: its driver says so, with the last lines of its stderr

    @property
    def summary(self) -> str:
        """One line."""
        lines = self.text.strip().splitlines() or [""]
        return lines[-1 if "Traceback (most recent call last)" in self.text and not self.is_death else 0]

    @property
    def is_of_a_lost_rank(self) -> bool:
        """Whether it only says that another rank is gone."""
        return not self.is_death and bool(LOST_RANK.search(self.text if self.is_exit else self.summary))

    @property
    def is_exit(self) -> bool:
        """Whether it ended its process, by sys.exit."""
        return not self.is_death and self.summary.partition(":")[0] == "SystemExit"


class RankReports:
    """The files of one rank: `open` in its process, before anything else runs there."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self._errors: list[RecordedError] = []

    def open(self) -> None:
        """From now on record exceptions of threads, and write all stacks to a file on STACK_SIGNAL."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if STACK_SIGNAL is not None:
            self._stacks = open(stack_file(self.folder, self.rank), "a")  # noqa: SIM115  # as long as the process
            with contextlib.suppress(ValueError):  # outside of the main thread, as in Ray
                signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # once the interpreter ends it would end the process
            faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        print_error = threading.excepthook

        def record_and_print(args: threading.ExceptHookArgs) -> None:
            if args.exc_value is not None:
                name = "?" if args.thread is None else args.thread.name
                self.record(f"thread {name}", args.exc_value, in_call=False)
            print_error(args)

        threading.excepthook = record_and_print

    def record(self, method: str, error: BaseException, in_call: bool = True) -> None:
        """Add an exception to this rank's file, which is replaced as a whole."""
        with _WRITING, contextlib.suppress(OSError):  # no room: the driver still hears of it through the pipe
            self._errors.append(RecordedError(time.time(), self.rank, method, error_text(error), in_call))
            del self._errors[:-_KEPT_ERRORS]
            new = self.folder / f"rank_{self.rank}.new"
            new.write_text(json.dumps([asdict(one) for one in self._errors]))
            os.replace(new, self.folder / f"rank_{self.rank}.json")

    def remove(self) -> None:
        """Delete the files of all ranks, where the driver can no longer do so."""
        shutil.rmtree(self.folder, ignore_errors=True)


def error_text(error: BaseException) -> str:
    """The message of an error that explains itself, the traceback of any other."""
    return str(error) if isinstance(error, VerlError) else "".join(traceback.format_exception(error))


def folder_of_this_node(name: str) -> Path:
    """The folder `name` among this machine's temporary files, which lie elsewhere on others; OSError where none may."""
    return Path(tempfile.gettempdir()) / name


def stack_file(folder: Path, rank: int) -> Path:
    """The file to which a rank writes its stacks, one after the other."""
    return folder / f"rank_{rank}.stack"


def read_errors(folder: Path) -> list[RecordedError]:
    """The errors that all ranks have recorded, in order of time; none where their group has been closed."""
    try:
        texts = [file.read_text() for file in folder.glob("rank_*.json")]
    except FileNotFoundError:
        return []
    return sorted((RecordedError(**one) for text in texts for one in json.loads(text)), key=lambda e: e.time)


def blame_earliest(
    error: WorkerError, since: float, recorded: Iterable[RecordedError], stuck: Sequence[str] = ()
) -> WorkerError:
    """The earliest error of the ranks after the time `since`, with a line for each other one and those of `stuck`;
    `error` itself if it is alone. Errors that say only that another rank is gone count as later. A death counts as
    earlier than what other ranks raised shortly before the driver heard of it, but follows what caused it. A stall
    stays one only where nothing was recorded before it: an exception that a rank recorded in the call, also in a
    background thread, comes first as its cause, and ends the run where the stall alone would restart it.
    """
    given = RecordedError(time.time(), error.rank, error.method, error.remote_traceback, is_death=error.is_death)
    found = [one for one in recorded if one.time >= since or not one.in_call]
    if not any((one.rank, one.text) == (given.rank, given.text) for one in found):
        found.append(given)
    own = [e.time for e in found if e.is_exit or (e.rank == given.rank and e is not given) if not e.is_of_a_lost_rank]
    died = max([given.time - _HEARD_WITHIN_S, *own])
    first = min(
        found,
        key=lambda e: (e.time < since, e.is_of_a_lost_rank, died if e.is_death else e.time, e.is_death),
    )
    others = {one.summary: one for one in reversed(found) if one.summary != first.summary}
    if not (others or stuck) and first.text == given.text:
        return error
    lines = [_line(one, first, one is given) for one in sorted(others.values(), key=lambda e: e.time)]
    text, is_given = "\n".join([first.text.rstrip(), *lines, *stuck]), first is given
    return WorkerError(first.rank, first.method, text, first.is_death, is_given and error.is_stall)


def _line(error: RecordedError, first: RecordedError, in_full: bool) -> str:
    after = error.time - first.time
    when = f"{after:.1f} s later" if after >= 0 else f"{-after:.1f} s earlier"
    why = ", as a consequence" if error.is_of_a_lost_rank else ""
    return f"{when}{why}: rank {error.rank} in {error.method}(): {error.text if in_full else error.summary}"


def ask_for_stacks(folder: Path, processes: dict[int, int]) -> dict[int, str]:
    """The stacks of each rank's threads; "" where it does not report them. `processes`: the process ids."""
    files = {rank: stack_file(folder, rank) for rank in processes if STACK_SIGNAL is not None}
    if not files:
        return dict.fromkeys(processes, "")
    before = {rank: _size(file) for rank, file in files.items()}
    for rank, size in before.items():
        with contextlib.suppress(OSError):  # it has ended
            if size >= 0:  # else it would end by the signal
                os.kill(processes[rank], STACK_SIGNAL)  # type: ignore[arg-type]
    sizes, start = before, time.monotonic()
    settled = start
    while (now := time.monotonic()) < start + _STACK_LIMIT_S:
        time.sleep(0.02)
        new = {rank: _size(file) for rank, file in files.items()}
        if new != sizes:
            sizes, settled = new, now
        elif now - settled > _SETTLED_S and all(sizes[rank] > before[rank] for rank in sizes):
            break
    found = {rank: file.read_text()[max(before[rank], 0) :] for rank, file in files.items() if sizes[rank] > 0}
    return {rank: found.get(rank, "") for rank in processes}


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else -1
