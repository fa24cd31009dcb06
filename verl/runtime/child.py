"""A child process of this machine: its process group, frames over a private socket, and how it ended."""

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket, socketpair

import verl

_END_S = 10.0  # that a child may take to end by itself, once its connection is closed
_POLL_S = 0.25
_MAX_FRAME_BYTES = 64 << 20


def in_words(code: int) -> str:
    """A return code of subprocess: the exit code, or the signal."""
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


class ChildLostError(Exception):
    """The child ended before it answered."""


class ChildLateError(Exception):
    """The child gave no answer within its limit, and must be ended."""


class Child:
    """`command` in a process group of its own: Ctrl-C is for the trainer.

    The descriptor of `theirs`, the child's end of a socket, becomes its last argument and is closed here. Its output is
    that of this process, or goes to `output`, or with `log_prefix` to the file `log`. No session of its own: Linux
    divides processor time between sessions, and let a trainer wait 20 s for its part beside two busy ones.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], theirs: socket | None = None,
        stdin: int = subprocess.DEVNULL, output: int | None = None, log_prefix: str = "", folder: str | None = None,
    ):  # fmt: skip
        self.log: Path | None = None
        self._is_over = False
        with contextlib.ExitStack() as ends:
            descriptors = [] if theirs is None else [ends.enter_context(theirs).fileno()]
            if log_prefix:
                output, name = tempfile.mkstemp(prefix=log_prefix, suffix=".log")
                ends.callback(os.close, output)
                self.log = Path(name)
            self.process = subprocess.Popen(
                [*command, *map(str, descriptors)], pass_fds=descriptors, stdin=stdin, stdout=output, stderr=output,
                env=dict(environment), cwd=folder, process_group=0,
            )  # fmt: skip

    def kill(self) -> None:
        """End it and all that it has started at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, limit_s: float = 0.0) -> int | None:
        """The exit code, if it ends by itself within `limit_s`; else None. Nothing that it started survives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(limit_s)
        code = self.process.returncode
        if not self._is_over:
            self.kill()
            self.process.wait()
            self._is_over = True
        return code

    def how_it_ended(self, limit_s: float = _END_S) -> str | None:
        """The exit code or signal in words; None where it does not end by itself within `limit_s`."""
        code = self.end(limit_s)
        return code if code is None else in_words(code)

    def last_lines(self) -> str:
        """The end of its output, as messages show it."""
        lines: list[str] = []
        with contextlib.suppress(FileNotFoundError):  # another thread's close() deletes it
            lines = self.log.read_text(errors="replace").strip().splitlines()[-12:] if self.log else []
        return "its last lines:\n  " + "\n  ".join(lines or ["(none)"])

    def close(self) -> None:
        """Close its standard input, end it, and delete its output."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended, and left something unread
                self.process.stdin.close()
        self.end(_END_S)
        if self.log is not None:
            self.log.unlink(missing_ok=True)

    def processor_s(self) -> float:
        """Processor seconds that it has used, so that a busy machine makes no child late; else the clock's."""
        with contextlib.suppress(OSError):  # not Linux, or it has ended
            return time.clock_gettime((~self.process.pid << 3) | 2)  # CPUCLOCK_SCHED of that process
        return time.monotonic()


class AskedChild:
    """A child that answers one frame of bytes with another, over a socket that no other process holds."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: int | None = None):
        ours, theirs = socketpair()
        self._connection = Connection(ours.detach())
        self.child = Child(command, environment, theirs, output=output)

    def ask(self, request: bytes, limit_s: float | None, processor_limit_s: float = math.inf) -> bytes:
        """The answer to `request`; errors as `receive` raises them."""
        with contextlib.suppress(OSError):  # it has ended, which `receive` says
            self._connection.send_bytes(request)
        return self.receive(limit_s, processor_limit_s)

    def receive(self, limit_s: float | None, processor_limit_s: float = math.inf) -> bytes:
        """The next frame; ChildLostError or ChildLateError, after which it must be ended.

        Poll intervals are added up, not the clock: a suspended process is not late.
        """
        poll_s = None if limit_s is None else min(_POLL_S, limit_s / 4, processor_limit_s / 4)
        used_s, before_s = 0.0, self.child.processor_s()
        try:
            while not self._connection.poll(poll_s):
                used_s += poll_s or 0.0
                if used_s >= (limit_s or math.inf) or self.child.processor_s() - before_s >= processor_limit_s:
                    raise ChildLateError("no answer within its limit")
            return self._connection.recv_bytes(_MAX_FRAME_BYTES)
        except (EOFError, OSError):
            raise ChildLostError(f"it ended with {self.child.how_it_ended() or 'no answer'}") from None

    def close(self) -> None:
        """End it, and what it has started, at once."""
        self.child.end()
        self._connection.close()


def finds_verl(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment`, in which another Python imports this package, too."""
    paths = (str(Path(verl.__file__).parent.parent), environment.get("PYTHONPATH"))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
