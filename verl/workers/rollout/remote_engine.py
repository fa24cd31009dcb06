"""The trainer's client of a rollout server: an engine whose calls run in another process."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import verl
from verl.config.rollout import RolloutConfig
from verl.plugin.platform import get_platform
from verl.runtime.wire import deserialize
from verl.utils import errors
from verl.utils.errors import VerlError, WorkerError
from verl.workers.rollout.base import (
    Completion,
    CopyingEngine,
    GenerationRequest,
    StaleWeightsError,
    TokenCallback,
    rollout_dtype,
)
from verl.workers.rollout.engine_server import HEADER_BYTES, encode_frame
from verl.workers.rollout.engine_stats import EngineStats

_EXIT_TIMEOUT_S = 10.0


class RemoteEngine(CopyingEngine):
    """One replica in its own process, which sees `devices` (and, with `rollout.server.python`, in its own Python
    environment)."""

    out_of_process = True

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str | Path,
        eos_token_ids: Sequence[int] = (),
        replica: int = 0,
        devices: Sequence[int] = (),
    ):
        self.config, self.replica, self.model_path = config, replica, Path(model_path)
        self.bucket_bytes = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.dtype = rollout_dtype(config.dtype)
        self._version, self._asleep = 0, False
        self._pending: dict[int, Future[Any]] = {}
        self._token_callbacks: dict[int, Callable[..., object]] = {}
        self._last_call_id = 0
        self._lock = threading.Lock()
        self._socket, self.process, self.log = start_server(config.server.python, devices)
        self._ended = False
        threading.Thread(target=self._read_replies, name=f"rollout replica {replica}", daemon=True).start()
        self._stop = weakref.finalize(self, stop_server, self._socket, self.process, self.log)
        self._started = self._call(
            "start", config=config, model_path=str(model_path), eos_token_ids=list(eos_token_ids), replica=replica
        )

    def wait_until_ready(self) -> None:
        """Wait until the engine has started; raises the error that prevented the start."""
        try:
            self._started.result(self.config.server.max_start_wait_time)
        except TimeoutError:
            raise self._failure(
                "start",
                f"not ready after rollout.server.max_start_wait_time={self.config.server.max_start_wait_time} s",
            ) from None

    @property
    def version(self) -> int:
        return self._version

    def _call(self, method: str, on_tokens: Callable[..., object] | None = None, **arguments: Any) -> "Future[Any]":
        """Future of the result; until it is set, the reader thread calls `on_tokens`."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a caller cannot cancel a future that the reader will set
        with self._lock:
            self._last_call_id += 1
            self._pending[self._last_call_id] = future
            if on_tokens is not None:
                self._token_callbacks[self._last_call_id] = on_tokens
            ended = self._ended
            if not ended:
                with contextlib.suppress(OSError):  # the reader notices it after the pending replies
                    self._socket.sendall(encode_frame([self._last_call_id, method, arguments]))
        if ended:
            self._fail_all()
        return future

    async def _call_async(self, method: str, **arguments: Any) -> Any:
        return await asyncio.wrap_future(self._call(method, **arguments))

    def _read_replies(self) -> None:
        """Consumes replies in a separate thread; returns when the server ends."""
        # a server that ends before it has read all calls resets the connection
        with self._socket.makefile("rb") as replies, contextlib.suppress(ConnectionError):
            while len(size := replies.read(HEADER_BYTES)) == HEADER_BYTES:
                call_id, succeeded, result = deserialize(replies.read(int.from_bytes(size, "little")))
                if succeeded is None:
                    self._token_callbacks[call_id](*result)
                    continue
                self._token_callbacks.pop(call_id, None)
                future = self._pending.pop(call_id)
                if succeeded:
                    future.set_result(result)
                else:
                    future.set_exception(self._to_exception(*result))
        with self._lock:
            self._ended = True
        self._fail_all()

    def _to_exception(self, kind: str, message: str) -> VerlError:
        if kind == "StaleWeightsError":
            return StaleWeightsError(message)
        error_class = getattr(errors, kind, None) if kind else None
        if error_class is None or error_class is WorkerError:
            return self._failure("generate", message)
        return error_class(message)

    def _fail_all(self) -> None:
        with self._lock:
            waiting, self._pending = self._pending, {}
        for future in waiting.values():
            future.set_exception(self._failure("generate", self._exit_message()))

    def _failure(self, method: str, message: str) -> WorkerError:
        return WorkerError(self.replica, method, f"rollout replica {self.replica}: {message}")

    def _exit_message(self) -> str:
        """How the process ended, for which it waits, and the last lines of its output."""
        try:
            code = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "its process closed the connection; start the run again, it resumes from its last checkpoint"
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        log = Path(self.log)
        last_lines = log.read_text(errors="replace").strip().splitlines()[-12:] if log.exists() else []
        return f"its process ended with {how}; its last lines:\n  " + "\n  ".join(last_lines or ["(none)"])

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return await self._await_answer(request, self._call("generate", request=request))

    async def stream(self, request: GenerationRequest, on_tokens: TokenCallback) -> list[Completion]:
        loop = asyncio.get_running_loop()

        def forward(*tokens: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(on_tokens, *tokens)

        return await self._await_answer(request, self._call("stream", forward, request=request))

    async def _await_answer(self, request: GenerationRequest, answer: "Future[Any]") -> list[Completion]:
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            self._call("abort", request_id=request.request_id)
            raise

    async def abort(self, request_id: int | None = None) -> None:
        await self._call_async("abort", request_id=request_id)

    async def begin_update(self) -> None:
        await self._call_async("begin_update")

    async def transport_step(self, step: str, argument: Any) -> list[Any]:
        return await self._call_async("transport_step", step=step, argument=argument)

    async def finish_update(self, version: int) -> None:
        self.read_back = await self._call_async("finish_update", version=version)
        self._version = version

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._call_async("compute_logprobs", sequences=[list(ids) for ids in sequences])

    async def sleep(self) -> None:
        await self._call_async("sleep")
        self._asleep = True

    async def sleep_until_update(self) -> None:
        await self._call_async("sleep_until_update")
        self._asleep = True

    async def wake(self) -> None:
        if self._asleep:
            await self._call_async("wake")
        self._asleep = False

    async def stats(self) -> list[EngineStats]:
        return await asyncio.wait_for(self._call_async("stats"), self.config.server.timeout)

    def close(self) -> None:
        """End the process."""
        self._stop()


def start_server(python: str | None, devices: Sequence[int] = ()) -> tuple[socket.socket, subprocess.Popen[bytes], str]:
    """Our endpoint of a private socket pair with the child process, the process, and the file of its output.

    It sees `devices`, indices among those of this process, or all.
    """
    ours, theirs = socket.socketpair()
    descriptor, log = tempfile.mkstemp(prefix="verl-rollout-", suffix=".log")
    source = str(Path(verl.__file__).parent.parent)
    environment = get_platform().rollout_environment(devices)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    with theirs, os.fdopen(descriptor, "wb") as output:
        server = [python or sys.executable, "-m", "verl.workers.rollout.engine_server"]
        process = subprocess.Popen(
            [*server, "--descriptor", str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            start_new_session=True,
        )  # fmt: skip
    return ours, process, log


def stop_server(connection: socket.socket, process: subprocess.Popen[bytes], log: str) -> None:
    """Close the connection, which ends the server; kill its process group after a timeout; delete its log."""
    with contextlib.suppress(OSError):  # already closed
        connection.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(_EXIT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    Path(log).unlink(missing_ok=True)
