"""Messages when a rank of fine-tuning is lost: one line; the tracebacks of the other ranks go to a file."""

import contextlib
import faulthandler
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from verl.runtime.processes import describe_exit
from verl.runtime.rank_reports import LOST_RANK
from verl.utils.process_end import exit_now

REPORTS = "VERL_RANK_REPORTS"  # folder that the launcher gives its ranks for their reports
FILE_NAME = "lost_rank.txt"
STALL = "stall"  # a file of the launcher's folder: a rank has named the culprit, and killed it
_CALL = re.compile(r'verl/trainer/sft/trainer\.py", line \d+,? in (\w+)')


@contextlib.contextmanager
def report_when_ended(rank: int) -> Iterator[None]:
    """Inside the block, SIGTERM makes this rank write where it is: the launcher sends it once another rank is lost.

    Enter it after a handler of SIGTERM was installed; that handler is called as well.
    """
    folder = _reports_folder()
    if folder is None:
        yield
        return
    with open(_report(folder, rank), "w") as file:
        faulthandler.register(signal.SIGTERM, file=file, all_threads=False, chain=True)
        try:
            yield
        except Exception:  # before the launcher's signal can end the process
            file.write(traceback.format_exc())
            file.flush()
            raise
        finally:
            faulthandler.unregister(signal.SIGTERM)


def end_if_rank_lost(error: BaseException, rank: int, root: Path) -> None:
    """End this process with status 1 if `error`, or what it came from, says that another rank is gone; else return.

    It comes from that where the launcher's signal arrives while this rank ends because of the lost one.
    The traceback goes to the launcher's folder, which then says what happened. Under a user's own torchrun it goes to
    a file in `root`; torchrun's report repeats the one line, and names the rank that was lost as its root cause.
    """
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    lost = next((one for one in chain if isinstance(one, RuntimeError) and LOST_RANK.search(str(one))), None)
    if lost is None:
        return
    text, folder = "".join(traceback.format_exception(lost)), _reports_folder()
    if folder:
        _report(folder, rank).write_text(text)
    else:
        root.mkdir(parents=True, exist_ok=True)
        file = root / f"rank_{rank}_{FILE_NAME}"
        file.write_text(text)
        line = f"rank {rank} lost another rank in {_call_in(text)}(): {file}"
        sys.stderr.write(f"error: {line}\n")  # in one piece: torchrun's ranks write without a buffer, beside each other
        _tell_torchrun(line)
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(1)  # the interpreter's shutdown would wait for the lost rank


def _tell_torchrun(line: str) -> None:
    """Write the file from which torchrun reads why this rank failed; it takes the earliest failure for the cause."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        after_the_lost_rank_s = int(time.time()) + 2  # torchrun has seen that one by now, and counts in whole seconds
        content = {"message": line, "timestamp": after_the_lost_rank_s}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(content))


def stall_is_said() -> None:
    """Let the launcher say nothing more: a rank has printed why the run ends."""
    if (folder := _reports_folder()) is not None:
        (folder / STALL).touch()


def report_lost_rank(exit_codes: dict[int, int], reports_folder: Path, root: Path) -> str | None:
    """The line about the first rank in `exit_codes` that a signal ended; None without one, or if a stall was said.

    The reports of all ranks are then kept in a file in `root`.
    """
    killed = [rank for rank, code in exit_codes.items() if code < 0 and code != -signal.SIGTERM]
    if not killed or (reports_folder / STALL).exists():
        return None
    reports = {file.name: text for file in sorted(reports_folder.glob("*.txt")) if (text := file.read_text())}
    calls = [call for text in reports.values() if (call := _call_in(text)) != "unknown"]
    root.mkdir(parents=True, exist_ok=True)
    file = root / FILE_NAME
    file.write_text("".join(f"=== {name}\n{text}\n" for name, text in reports.items()))
    where = f"{calls[0]}()" if calls else "a call that no other rank was in"
    return (
        f"rank {killed[0]} failed in {where}: its process {describe_exit(exit_codes[killed[0]])}; where the others "
        f"were is in {file}"
    )


def _reports_folder() -> Path | None:
    """The folder of a launcher that waits for reports; None where there is none (any more)."""
    folder = os.environ.get(REPORTS)
    return Path(folder) if folder and Path(folder).is_dir() else None


def _report(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def _call_in(text: str) -> str:
    """The trainer's innermost call in a traceback."""
    calls = _CALL.findall(text) or ["unknown"]
    return str(calls[0] if "most recent call first" in text else calls[-1])
