"""Warm workers that run untrusted programs, and the trusted end of the pipes to them.

A program gets one input and gives bytes back. Whoever asks compares them here, outside; no expected output, other test
or verdict is ever in a process of the sandbox. docs/rewards/sandbox.md says what is promised and what is limited.
"""

import contextlib
import fcntl
import importlib.util
import json
import logging
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.rewards.worker_slots import OfProcess, WorkerSlots
from verl.runtime.child import Child
from verl.utils.cores import num_cores
from verl.utils.errors import RewardError

logger = logging.getLogger(__name__)

_WORKER_FILE = Path(__file__).with_name("inside") / "worker.py"
_START_LIMIT_S, _END_LIMIT_S = 60.0, 20.0
_CHUNK = 1 << 16
MODES = ("namespaces", "fallback")


class SandboxError(RewardError):
    """The sandbox could not run a program: that says nothing about the program, which gets no score."""


class _ModeError(SandboxError):
    """This kernel does not allow what the mode needs."""


class _WorkerGoneError(Exception):
    """A worker ended, or does not answer."""


@dataclass(frozen=True)
class Limits:
    """Limits of one program; whatever passes a limit is killed."""

    cpu_s: float = 10.0  # of all its threads, rounded up
    wall_s: float = 30.0
    memory_mb: int = 1024  # address space beyond that of the empty interpreter
    output_bytes: int = 16 << 20  # of stdout and stderr together
    scratch_mb: int = 16  # files of its own


@dataclass(frozen=True)
class ProgramResult:
    """A program's output and how it ended. It writes what it likes: only bytes that equal a secret prove anything."""

    stdout: bytes
    stderr: bytes
    ending: str  # exit, signal, or the limit at which it was killed: cpu, wall, output
    exit_code: int  # minus the signal, where one ended it
    cpu_s: float
    wall_s: float = 0.0  # on the clock

    @property
    def is_success(self) -> bool:
        """It ended by itself with exit code 0."""
        return self.ending == "exit" and self.exit_code == 0


class Sandbox:
    """At most `size` workers, which start on first use; any number of threads may run programs.

    `mode` is "namespaces", "fallback" or None: the stronger one that this kernel allows.
    """

    def __init__(self, size: int | None = None, mode: str | None = None):
        self._modes = list(MODES if mode is None else (mode,))
        self._choosing = threading.Lock()
        self._slots: WorkerSlots[_Worker] = WorkerSlots(size or (num_cores() if sys.platform == "linux" else 1))

    @property
    def mode(self) -> str:
        """In which programs run: known after the first."""
        return self._modes[0]

    def run(self, request: Mapping[str, Any], stdin: bytes, limits: Limits) -> ProgramResult:
        """Run the program of a request {source} or {source, call} (inside/program.py)."""
        worker = self._slots.take()
        try:
            for _ in range(2):
                worker = worker or self._start()
                try:
                    return worker.run(request, stdin, limits)
                except _WorkerGoneError as error:
                    problem = error
                worker.kill()  # once more in a new one: the machine may have run out of memory
                worker = None
            raise SandboxError(f"two workers of the sandbox were lost with the same program: {problem}")
        except BaseException:
            if worker is not None:
                worker.kill()
                worker = None
            raise
        finally:
            self._slots.put_back(worker)

    def _start(self) -> "_Worker":
        with self._choosing:
            while True:
                try:
                    worker = _Worker(self._modes[0])
                except _ModeError as error:
                    if len(self._modes) == 1:
                        raise
                    del self._modes[0]
                    logger.warning(
                        "programs run in the weaker sandbox, because this kernel gives no namespaces (%s): they can "
                        "open no file and make no process or connection, but see file sizes (docs/rewards/sandbox.md)",
                        error,
                    )
                else:
                    del self._modes[1:]  # what this kernel can do once it can do again
                    return worker

    def close(self) -> None:
        """Kill the workers that are free; a later program starts new ones."""
        for worker in self._slots.clear():
            worker.kill()


class _Worker:
    """One worker process and the socket to it; SandboxError when it cannot start."""

    def __init__(self, mode: str):
        if sys.platform != "linux":
            raise SandboxError("programs run on Linux alone; elsewhere set reward.sandbox_fusion.url to a server")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        view = json.dumps(_view())
        environment = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        command = [sys.executable, "-P", "-s", "-S", str(_WORKER_FILE), mode, view]
        self._child = Child(command, environment, theirs, output=subprocess.DEVNULL, folder="/")
        self._control.settimeout(_START_LIMIT_S)
        try:
            started = self._reply()
        except _WorkerGoneError as error:
            self.kill()
            raise SandboxError(f"a worker of the sandbox did not start: {error}") from error
        if "error" in started or started["code"]:
            self.kill()
            raise _ModeError(f"the sandbox cannot run with mode={mode!r}: {started.get('error', started)}")

    def run(self, request: Mapping[str, Any], stdin: bytes, limits: Limits) -> ProgramResult:
        body = {
            **request, "memory_bytes": limits.memory_mb << 20, "cpu_s": max(1, math.ceil(limits.cpu_s)),
            "scratch_bytes": limits.scratch_mb << 20,
        }  # fmt: skip
        with contextlib.ExitStack() as ours:
            with contextlib.ExitStack() as theirs:
                files = [_memory_file(content, theirs) for content in (json.dumps(body).encode(), stdin)]
                readers = []
                for _ in ("stdout", "stderr"):
                    reader, writer = os.pipe()
                    ours.callback(os.close, reader)
                    theirs.callback(os.close, writer)
                    readers.append(reader)
                    files.append(writer)
                try:
                    socket.send_fds(self._control, [b"run"], files)
                except OSError as error:
                    raise _WorkerGoneError(str(error)) from error
            return self._follow(readers, limits)

    def _follow(self, readers: list[int], limits: Limits) -> ProgramResult:
        """Read until the worker says that the program is gone; tell it to kill what passes a limit."""
        written = {reader: bytearray() for reader in readers}
        poll, limit_hit, start = select.poll(), "", time.monotonic()
        for number in (*readers, self._control.fileno()):
            poll.register(number, select.POLLIN)
        end = start + limits.wall_s
        while True:
            ready = [number for number, _ in poll.poll(max(0, 1000 * (end - time.monotonic())))]
            for reader in set(ready) & set(readers):
                chunk = os.read(reader, _CHUNK)
                if not chunk:
                    poll.unregister(reader)
                elif not limit_hit:
                    written[reader] += chunk
            if self._control.fileno() in ready:
                break
            is_late, is_over = time.monotonic() >= end, sum(map(len, written.values())) > limits.output_bytes
            if is_late and limit_hit:
                raise _WorkerGoneError(f"no answer {_END_LIMIT_S} s after its program should have ended")
            if not limit_hit and (is_late or is_over):
                limit_hit, end = "output" if is_over else "wall", time.monotonic() + _END_LIMIT_S
                self._control.send(b"kill")
        return self._result(readers, written, limit_hit, limits, time.monotonic() - start)

    def _result(
        self, readers: list[int], written: dict[int, bytearray], limit_hit: str, limits: Limits, wall_s: float
    ) -> ProgramResult:
        ended = self._reply()
        if "error" in ended:
            raise SandboxError(f"the sandbox could not prepare a program: {ended['error']}")
        for reader in readers:  # what the program left in the pipe; nobody writes any more
            os.set_blocking(reader, False)
            with contextlib.suppress(BlockingIOError):
                while not limit_hit and (chunk := os.read(reader, _CHUNK)):
                    written[reader] += chunk
        if not limit_hit:
            is_killed = ended["code"] == -9 and ended["cpu_s"] > limits.cpu_s / 2  # the kernel counts ticks
            limit_hit = "cpu" if is_killed else "signal" if ended["code"] < 0 else "exit"
        stdout, stderr = (bytes(written[reader][: limits.output_bytes]) for reader in readers)
        return ProgramResult(stdout, stderr, limit_hit, ended["code"], ended["cpu_s"], wall_s)

    def _reply(self) -> dict[str, Any]:
        try:
            reply = self._control.recv(_CHUNK)
        except OSError as error:
            raise _WorkerGoneError(f"no answer: {error}") from error
        if not reply:
            raise _WorkerGoneError("it ended")
        return json.loads(reply)

    def kill(self) -> None:
        """End the worker and, with the end of its init, everything it started."""
        self._control.close()  # it ends at once, and its parent can still wait for it
        self._child.end(_END_LIMIT_S / 2)


def _memory_file(content: bytes, stack: contextlib.ExitStack) -> int:
    """A descriptor of a file in memory that nobody can change, at its beginning; the stack closes it."""
    number = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, number)
    view = memoryview(content)
    while view:
        view = view[os.write(number, view) :]
    os.lseek(number, 0, os.SEEK_SET)
    fcntl.fcntl(number, fcntl.F_ADD_SEALS, 15)  # SEAL, SHRINK, GROW, WRITE
    return number


def _view() -> dict[str, Any]:
    """Folders that programs see: the Python library, the shared libraries (no folder in another), and numpy."""
    paths = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    paths += [f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib", os.path.dirname(os.__file__)]
    packages = {}
    found = importlib.util.find_spec("numpy")
    if found and found.submodule_search_locations:
        folder = found.submodule_search_locations[0]
        paths += [folder, f"{folder}.libs"]
        packages["numpy"] = os.path.dirname(folder)
    real = list(dict.fromkeys(path for path in paths if os.path.exists(path)))
    outer = [p for p in real if not any(p.startswith(f"{q}/") and not os.path.islink(q) for q in real)]
    return {"paths": outer, "packages": packages}


# the sandbox of this process, with a worker for each processor
shared_sandbox = OfProcess(lambda: Sandbox())


def run_program(code: str, stdin: bytes | str = b"", limits: Limits = Limits()) -> ProgramResult:
    """Run Python source that nobody trusts, with `stdin`; SandboxError only where the sandbox itself fails."""
    return shared_sandbox().run({"source": code}, stdin.encode() if isinstance(stdin, str) else stdin, limits)
