"""A rank builds the worker and runs calls in order; and the process of a rank of a `ProcessGroup`."""

import asyncio
import contextlib
import faulthandler
import inspect
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from verl.runtime.device_collectives import tell_device_waits
from verl.runtime.rank import RankInfo, end_rank
from verl.runtime.rank_reports import RankReports, error_text
from verl.runtime.wire import deserialize, serialize

BUILD_CALL = 0  # number of every rank's first call, which builds its worker
ADDRESS = "127.0.0.1"


def serve(
    rank: RankInfo,
    port: int,
    interface: str | None,
    connection: Connection,
    stderr: Connection,
    reports: RankReports,
    factory: Callable[[], Any],
) -> None:
    """The main function of a rank's process."""
    os.dup2(stderr.fileno(), 2)
    stderr.close()
    reports.open()
    tell_device_waits(reports.folder, reports.rank)
    faulthandler.enable()  # prints a traceback after a crash in native code
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach all processes of a job; only the driver handles them
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(rank.env_variables(ADDRESS, port))
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)

    def build() -> Any:
        rank.init_process_group(dist.PrefixStore("ranks", dist.TCPStore(ADDRESS, port, is_master=False)))
        return factory()

    asyncio.run(_PipeServer(connection, reports).run(build))
    end_rank()


class CallServer(ABC):
    """Runs calls one after the other; coroutine methods run concurrently, between the other calls.

    An exception of a call is sent to the driver and raised there: as its traceback, or as its message if it is a
    `VerlError`.
    """

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[tuple[Any, Any] | None] = asyncio.Queue()  # packed calls and arguments; None: end
        self.tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on put what arrives into `inbox`, in `loop`."""

    @abstractmethod
    def unpack(self, packed: Any) -> Any:
        """The calls, or the arguments, of a message."""

    @abstractmethod
    def send(self, reply: tuple[int, bool, Any]) -> None:
        """Send (number of the call, whether it succeeded, result or error) to the driver."""

    def record(self, method: str, error: BaseException) -> None:  # noqa: B027  # nothing, where nobody reads it
        """Note the failure of a call before the driver is told."""

    async def run(self, build: Callable[[], Any]) -> None:
        """Build the worker, then serve until the driver asks to end."""
        self.listen(asyncio.get_running_loop())
        try:
            worker = build()
        except Exception as error:
            self.reply_error(BUILD_CALL, "__init__", error)
            while await self.inbox.get() is not None:  # until the driver has read the error and asks to end
                pass
            return
        self.reply(BUILD_CALL, "__init__", None)
        while (message := await self.inbox.get()) is not None:
            self.run_calls(worker, *message)
        for task in self.tasks:
            task.cancel()

    def run_calls(self, worker: Any, header: Any, body: Any) -> None:
        """Run a message's calls: plain methods at once, coroutine methods together afterwards."""
        calls: list[tuple[int, str]] = self.unpack(header)
        try:
            arguments = self.unpack(body)
        except Exception as error:
            for number, method in calls:
                self.reply_error(number, method, error)
            return
        for (number, method), args in zip(calls, arguments, strict=True):
            try:
                result = attrgetter(method)(worker)(*args)
            except Exception as error:
                self.reply_error(number, method, error)
                continue
            except BaseException as error:  # SystemExit, which ends the process
                self.record(method, error)
                raise
            if inspect.iscoroutine(result):
                task = asyncio.create_task(self.run_coroutine(number, method, result))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                self.reply(number, method, result)

    async def run_coroutine(self, number: int, method: str, coroutine: Any) -> None:
        try:
            result = await coroutine
        except Exception as error:
            self.reply_error(number, method, error)
        else:
            self.reply(number, method, result)

    def reply(self, number: int, method: str, value: Any) -> None:
        """Send the result of call `number`."""
        try:
            self.send((number, True, value))
        except Exception as error:  # a result of an unsupported type fails the call
            self.reply_error(number, method, error)

    def reply_error(self, number: int, method: str, error: Exception) -> None:
        """Record and send the failure of call `number`."""
        self.record(method, error)
        self.send((number, False, error_text(error)))


class _PipeServer(CallServer):
    """The calls come over a pipe. A thread receives them, so that a rank that is stuck ends with its driver."""

    def __init__(self, connection: Connection, reports: RankReports):
        super().__init__()
        self.connection, self.reports = connection, reports

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        threading.Thread(target=self.read, args=(loop,), daemon=True).start()

    def read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                header = self.connection.recv_bytes()
                message = (header, self.connection.recv_bytes()) if header else None
            except (EOFError, OSError):  # the driver is gone
                self.reports.remove()
                os._exit(1)
            with contextlib.suppress(RuntimeError):  # the rank has ended its calls; only the driver is still watched
                loop.call_soon_threadsafe(self.inbox.put_nowait, message)

    def unpack(self, packed: bytes) -> Any:
        return deserialize(packed)

    def record(self, method: str, error: BaseException) -> None:
        self.reports.record(method, error)

    def send(self, reply: tuple[int, bool, Any]) -> None:
        data = serialize(reply)
        try:
            self.connection.send_bytes(data)
        except OSError:
            os._exit(1)  # the driver is gone
