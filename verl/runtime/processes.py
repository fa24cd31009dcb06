"""Ranks in local processes, without Ray: spawned, connected by torch.distributed, called over pipes.

The driver sends calls and stores a future for each. One thread receives the replies and watches the processes, so it
reports the death of a rank at once, even while other ranks wait in a collective. It forwards the ranks' stderr to the
driver's; when a rank dies, the error quotes the last part of its stderr. Another thread watches for ranks that stall.
"""

import atexit
import contextlib
import multiprocessing
import multiprocessing.spawn
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl.runtime import rank_server
from verl.runtime.calls import GRACE_S, RemoteGroup
from verl.runtime.group import Layout
from verl.runtime.rank import RankInfo
from verl.runtime.rank_observation import RankProcess, RanksOfMachine
from verl.runtime.rank_reports import RankReports, blame_earliest
from verl.runtime.stall_watch import STALL_TIMEOUT_S, StallWatch, describe_stuck
from verl.runtime.wire import deserialize, serialize
from verl.utils.errors import WorkerError

STDERR_TAIL_BYTES = 4000  # bytes of a rank's stderr that are quoted when it dies


class ProcessGroup(RemoteGroup):
    """`layout.world_size` local processes, each with a worker built by `factory()` in that process.

    `factory` must be importable, and the program's main module must guard its code (`if __name__ == "__main__":`).
    Arguments and results have types that wire.py supports. Raises WorkerError when a rank fails, dies or stalls (inside
    a call, `stall_timeout_s` without CPU time or bytes; 0: never); after a death or a stall the group is unusable and
    its processes have ended.

    Its ranks use the devices from `first_device` on, and a share of the cores of `ranks_on_machine` (default: its own);
    `name` distinguishes its messages from those of other groups. `launcher(rank)` gives the words of a program that
    starts the rank's Python, such as a profiler, whose process is then watched in place of the rank's.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        layout: Layout,
        name: str = "",
        first_device: int = 0,
        ranks_on_machine: int | None = None,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        launcher: Callable[[int], list[str]] = lambda rank: [],
    ):
        super().__init__(layout, name)
        self.launcher = launcher
        self._reports = tempfile.TemporaryDirectory(prefix="verl-ranks-", ignore_cleanup_errors=True)
        self.first_device, self.ranks_on_machine = first_device, ranks_on_machine or layout.world_size
        self._connections: list[connection.Connection] = []
        self._stderrs: list[connection.Connection] = []
        self._stderr_tails = [b""] * layout.world_size
        self._processes: list[Any] = []
        self._stall_watch: StallWatch | None = None
        atexit.register(self.close)  # before multiprocessing sends SIGTERM, which ranks ignore, and waits
        try:
            self._start(factory)
            _, building = self._register_call("__init__", range(layout.world_size))
            threading.Thread(target=self._watch, daemon=True).start()
            processes = {rank: RankProcess(process.pid) for rank, process in enumerate(self._processes)}
            self._ranks = RanksOfMachine(processes, Path(self._reports.name), [os.getpid()])
            self._stall_watch = StallWatch(
                self._ranks, layout.world_size, self._open_calls, self._fail_and_kill, stall_timeout_s
            ).start()
            self._wait_for_results(building)
        except BaseException:
            if self._stall_watch is None:  # ranks that have started would wait for those that have not
                self._kill_ranks()
            self.close()
            raise

    def _start(self, factory: Callable[[], Any]) -> None:
        context, size = multiprocessing.get_context("spawn"), self.layout.world_size
        listener = socket.create_server((rank_server.ADDRESS, 0))  # so that only this machine can reach the store
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            rank_server.ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        for rank in range(size):
            driver_end, rank_end = context.Pipe()
            stderr_reader, stderr_writer = context.Pipe(duplex=False)
            info = RankInfo(rank, size, self.first_device + rank, self.ranks_on_machine)
            reports = RankReports(Path(self._reports.name), rank)
            args = (info, port, loopback_interface(), rank_end, stderr_writer, reports, factory)
            process = context.Process(target=rank_server.serve, args=args, daemon=True, name=self._label(rank))
            with started_by(self.launcher(rank), Path(self._reports.name) / f"start_{rank}"):
                process.start()
            rank_end.close()  # so that the driver reads end-of-file once the process has ended
            stderr_writer.close()
            self._connections.append(driver_end)
            self._stderrs.append(stderr_reader)
            self._processes.append(process)

    # --- messages ------------------------------------------------------------------------------------------------

    def _pack(self, arguments: list[tuple[Any, ...]]) -> bytes:
        return serialize(arguments)

    def _send(self, rank: int, calls: list[tuple[int, str]], body: bytes) -> None:
        with contextlib.suppress(OSError):  # the rank has ended; the watching thread reports it
            self._connections[rank].send_bytes(serialize(calls))
            self._connections[rank].send_bytes(body)

    def _kill_ranks(self) -> None:
        for process in self._processes:
            process.kill()

    def _find_cause(self, error: WorkerError, since: float, stuck: Sequence[int] = ()) -> WorkerError:
        texts = self._ranks.ask_for_stacks(stuck)
        return blame_earliest(
            error, since, self._ranks.read_errors(), [describe_stuck(*item) for item in texts.items()]
        )

    # --- replies, in the watching thread ---------------------------------------------------------------------------

    def _watch(self) -> None:
        replies: dict[Any, int] = {c: rank for rank, c in enumerate(self._connections)}
        stderrs: dict[Any, int] = {c: rank for rank, c in enumerate(self._stderrs)}
        while replies or stderrs:
            ready = connection.wait([*replies, *stderrs])
            for pipe in [pipe for pipe in ready if pipe in stderrs]:
                if not self._forward_stderr(stderrs[pipe]):
                    del stderrs[pipe]
            for pipe in [pipe for pipe in ready if pipe in replies]:
                rank = replies[pipe]
                try:
                    number, succeeded, value = deserialize(self._connections[rank].recv_bytes())
                except (EOFError, OSError):
                    del replies[pipe]
                    self._on_death(rank)
                else:
                    self._resolve(rank, number, succeeded, value)

    def _forward_stderr(self, rank: int) -> bool:
        """Print what the rank wrote to stderr; False at end-of-file."""
        try:
            data = os.read(self._stderrs[rank].fileno(), 1 << 16)
        except OSError:
            return False
        self._stderr_tails[rank] = (self._stderr_tails[rank] + data)[-STDERR_TAIL_BYTES:]
        for line in data.decode(errors="replace").splitlines():
            print(f"[{self._label(rank)}] {line}", file=sys.stderr)
        return bool(data)

    def _on_death(self, rank: int) -> None:
        if self._is_ending(rank):
            return
        process = self._processes[rank]
        process.join(GRACE_S)
        while connection.wait([self._stderrs[rank]], timeout=0) and self._forward_stderr(rank):
            pass
        reason = f"its process {describe_exit(process.exitcode)}"
        if tail := self._stderr_tails[rank].decode(errors="replace").strip():
            reason += f"\nthe last lines of its stderr:\n{tail}"
        self._report_death(rank, reason)

    def close(self) -> None:
        """Ask the ranks to end; kill those still running after GRACE_S. Calls of other threads then fail."""
        if self._closing:
            return
        self._closing = True
        if self._stall_watch is not None:
            self._stall_watch.end()
        atexit.unregister(self.close)
        if self._sending.acquire(timeout=GRACE_S):  # else a stopped rank blocks another thread's message
            for pipe in self._connections:
                with contextlib.suppress(OSError):
                    pipe.send_bytes(b"")
            self._sending.release()
        for process in self._processes:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._reports.cleanup()


@contextlib.contextmanager
def started_by(words: list[str], script: Path) -> Iterator[None]:
    """Processes that are spawned inside have `words` before their command, by `script`; for none, nothing changes."""
    if not words:
        yield
        return
    python = multiprocessing.spawn.get_executable()
    script.write_text(f'#!/bin/sh\nexec {shlex.join([*words, os.fsdecode(python)])} "$@"\n')
    script.chmod(0o700)
    multiprocessing.spawn.set_executable(str(script))
    try:
        yield
    finally:
        multiprocessing.spawn.set_executable(python)


def describe_exit(code: int | None) -> str:
    """How a process ended, and what to do about it."""
    if code is None:
        return "closed its connection but kept running; it was killed"
    if code >= 0:
        return f"ended with exit code {code}; its own code ended it (sys.exit, os._exit): see its output above"
    name = signal.Signals(-code).name
    if code == -signal.SIGKILL:
        return (
            f"was killed by {name}, as the kernel does when memory runs out (see dmesg); use fewer ranks, smaller "
            "*_max_token_len_per_gpu, or param_offload, and resume from the last checkpoint"
        )
    return f"was killed by {name}; resume from the last checkpoint, and report it if it comes back"


def loopback_interface() -> str | None:
    """The name of the loopback network interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
