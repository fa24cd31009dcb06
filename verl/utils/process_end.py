"""A command's end is always said: user code that ends or kills the process cannot do so without a word.

`os._exit` called inside the process is named and never gives status 0. Whatever else ends the process at once (a crash
in native code, a kill) gives a status of its own; a small process beside it reads a pipe, outlives it and says so. One
end keeps status 0: native code that calls C's `_exit(0)`, which is said on stderr, but only the process itself has the
status that a shell or a scheduler sees. A parent that runs the command as its child could change it. It would pass
signals on, and a Ctrl-C or a scheduler's signal to the whole group would then arrive twice, which means "stop at once";
the command also keeps its process id, terminal and debugger without one.
"""

import atexit
import contextlib
import faulthandler
import gc
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import ClassVar, NoReturn

OVER = b"\0"  # through the pipe: the end was said
exit_now = os._exit  # for our own code: `os._exit` is replaced while a command runs

HELD_S = 1.0  # how long an error waits for exit hooks and threads, which may hang
CLOSING_S = 10.0  # for the files that user code left open; writing one may hang, on a pipe that nobody reads
FLUSH_FAILED = 120  # the status that Python gives where stdout cannot be written

ADVICE = "raise an exception there instead; "


class EarlyEndReport:
    """While entered, an end of this process that does not leave the block is said on stderr, with a status not 0.

    Within another such block, and in a rank of torchrun (which says how its ranks end), no watching process starts.
    """

    active: "ClassVar[EarlyEndReport | None]" = None
    resume_point = b""  # of the run, once it is known: see set_resume_point

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.outer_exit = os._exit
        self.pipe: int | None = None
        self.watcher: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> None:
        if self.outer_exit is not exit_now:
            return
        self.stderr = os.dup(2) if sys.stderr is not None else None  # user code may close its own
        if not faulthandler.is_enabled() and sys.stderr is not None:
            with contextlib.suppress(ValueError, OSError):  # notebooks and tests give a stderr without a file
                faulthandler.enable()  # a crash in native code prints where
        if "WORLD_SIZE" not in os.environ:
            self._start_watcher()
        os._exit = self._exit
        EarlyEndReport.active = self

    def _start_watcher(self) -> None:
        reader, self.pipe = os.pipe()
        command = [sys.executable, "-I", "-S", __file__, str(self.owner)]
        with contextlib.suppress(OSError):  # no process can be started: the run goes on unwatched
            self.watcher = subprocess.Popen(command, stdin=reader, stdout=subprocess.DEVNULL, start_new_session=True)
        os.close(reader)

    def _exit(self, status: int) -> NoReturn:
        if os.getpid() != self.owner:  # a forked child ends this way
            exit_now(status)
        frame = sys._getframe(1)
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        text = f"error: os._exit({status}) ended the process before the run was over, called at {where}; {ADVICE}"
        text += how_to_resume(self.resume_point) + "\n"
        with contextlib.suppress(ValueError, OSError):
            sys.stdout.flush()
        with contextlib.suppress(OSError, TypeError):  # where it cannot be written, the watcher speaks
            os.write(self.stderr, text.encode())  # type: ignore[arg-type]
            self._mark_reported()
        exit_now(status or 1)

    def note_resume_point(self, text: bytes) -> None:
        self.resume_point = text
        if self.pipe is not None:
            with contextlib.suppress(OSError):  # the watcher was killed
                os.write(self.pipe, text)

    def _mark_reported(self) -> None:
        if self.pipe is not None:
            with contextlib.suppress(OSError):  # the watcher was killed
                os.write(self.pipe, OVER)
            os.close(self.pipe)
            self.pipe = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.outer_exit is not exit_now or os.getpid() != self.owner:
            return
        os._exit, EarlyEndReport.active = exit_now, None
        self._mark_reported()
        if self.watcher is not None:
            self.watcher.wait()
        if self.stderr is not None:
            os.close(self.stderr)


def report_early_end(process: int) -> None:
    """Wait for the end of the pipe at stdin; without OVER before it, say how `process` ended."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resume_point = b""
    while part := os.read(0, 65536):
        resume_point += part
        if resume_point.endswith(OVER):
            return
    text = f"its process {process} {how_it_ended(process)}{how_to_resume(resume_point)}"
    print(f"error: the run is not over, but {text}", file=sys.stderr)


def set_resume_point(latest_step_file: Path, run_name: str) -> None:
    """Where the run of this command can be resumed, for the advice about an early end; only the first call counts."""
    if (end := EarlyEndReport.active) is not None and os.getpid() == end.owner and not end.resume_point:
        end.note_resume_point(json.dumps([str(latest_step_file.absolute()), run_name]).encode())


last_words: list[str] = []  # errors that wait for the exit hooks
holds_errors = False  # whether this process is that of a command, which says its error last


def say_error(text: str) -> None:
    """Print `text` on stderr, after what was printed before it; as the last words of a command that ends by it."""
    last_words.append(text)
    if not holds_errors:
        say_last_words()
        return
    too_late = threading.Timer(HELD_S, say_last_words)
    too_late.daemon = True
    too_late.start()


def say_last_words() -> None:
    """Print the errors that wait, after what stdout still holds."""
    with contextlib.suppress(ValueError, OSError):  # who reads stdout no more may still read stderr
        sys.stdout.flush()
    while last_words:
        print(last_words.pop(0), file=sys.stderr, flush=True)


def end_process(main: Callable[[], int]) -> NoReturn:
    """Run `main` and end its process with the status that it returns; an error comes after what exit hooks print.

    Without the interpreter's teardown where torch is loaded, which it would free for seconds, object by object.
    """
    global holds_errors
    atexit.register(say_last_words)  # the first one registered runs last
    holds_errors = "WORLD_SIZE" not in os.environ  # a rank may be killed as soon as another one fails
    status = main()
    if "torch" in sys.modules and not sys.flags.interactive and not _is_run_by_code(sys._getframe(1)):
        end_without_freeing_objects(status)
    sys.exit(status)


def _is_run_by_code(frame: FrameType) -> bool:
    """Whether a profiler or debugger runs the program that called, and wants to go on after it."""
    outer = frame.f_back
    while outer is not None and (outer.f_code.co_name == "<module>" or outer.f_globals.get("__name__") == "runpy"):
        outer = outer.f_back
    return outer is not None


def end_without_freeing_objects(status: int) -> NoReturn:
    """End the process after all that an interpreter does for others: threads end, exit hooks run, files are closed."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit.unregister(say_last_words)
    atexit._run_exitfuncs()
    closing = threading.Thread(target=close_files_left_open, daemon=True)
    closing.start()
    closing.join(CLOSING_S)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or FLUSH_FAILED
    say_last_words()
    exit_now(status)


def close_files_left_open() -> None:
    """Close the files that are open for writing, as the interpreter does where user code leaves them to it."""
    streams = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    kept = {id(stream) for stream in [*streams, *(getattr(stream, "buffer", None) for stream in streams)]}
    kinds = (io.FileIO, io.BytesIO, io.StringIO)  # without a buffer, or without a file
    files = [f for f in gc.get_objects() if issubclass(type(f), io.IOBase) and not issubclass(type(f), kinds)]
    for file in sorted(files, key=_depth):
        with contextlib.suppress(Exception):  # of a class of the user's, or a disk without room
            if id(file) not in kept and not file.closed and file.writable():
                file.close()


def _depth(file: io.IOBase) -> int:
    """Text lies on bytes, compression between them: what lies on top is closed first."""
    return 0 if isinstance(file, io.TextIOBase) else 2 if type(file).__module__ == "_io" else 1


def how_to_resume(resume_point: bytes) -> str:
    """The line that says how to resume, given what set_resume_point wrote."""
    if not resume_point:
        return "the same command, under the name of the run, goes on from its last checkpoint if it has saved one"
    latest, name = json.loads(resume_point)
    try:
        step = int(Path(latest).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "nothing was saved: the same command begins with step 1"
    return f"the same command resumes from global_step_{step}, with trainer.experiment_name={name}"


def how_it_ended(process: int) -> str:
    """How a process that has ended and is still listed did so."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{process}/stat", encoding="utf-8") as file:
        status = int(file.read().rpartition(")")[2].split()[49])  # field 52 of proc(5): exit_code
        if not os.WIFSIGNALED(status):
            code = os.waitstatus_to_exitcode(status)
            though = " (which is that of a success, but this run has failed)" if code == 0 else ""
            return f"ended with status {code}{though}: native code called exit; {ADVICE}"
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in signal.valid_signals() else str(number)
        if number == signal.SIGKILL:
            return "was killed by SIGKILL, as the kernel does when memory runs out (see dmesg); "
        if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            return f"crashed ({name}): the lines above show where, if its Python could still write; "
        return f"was ended by {name}; "
    return "is gone: it was killed, it crashed, or native code called exit; "


if __name__ == "__main__":
    report_early_end(int(sys.argv[1]))
