"""The trainer's client of a rollout server: an engine whose calls run in another process."""

import asyncio
import contextlib
import queue
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from verl.config.rollout import RolloutConfig
from verl.plugin.platform import get_platform
from verl.runtime.rank import COLLECTIVE_TIMEOUT
from verl.runtime.stall_watch import Progress
from verl.runtime.wire import deserialize
from verl.utils import errors
from verl.utils.errors import ReplicaError, VerlError, WorkerError
from verl.workers.rollout.base import (
    Completion,
    CopyingEngine,
    GenerationRequest,
    StaleWeightsError,
    TokenCallback,
    rollout_dtype,
)
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.remote.process import LocalServer, Server
from verl.workers.rollout.remote.profiles import ProfiledServer
from verl.workers.rollout.remote.server import HEADER_BYTES, encode_frame, frame_bytes

_CLOSE_S = 5.0  # for the thread that reads, once its process has ended
_SIGN_OF_LIFE = 0  # the number of calls whose answers nobody awaits
_Call = list[Any]  # number, method, arguments


class RemoteEngine(ProfiledServer, CopyingEngine):
    """One replica in its own process: `server`, or one of this machine that sees `devices` (and, with
    `rollout.server.python`, in its own Python environment)."""

    out_of_process = True

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str | Path,
        eos_token_ids: Sequence[int] = (),
        replica: int = 0,
        devices: Sequence[int] = (),
        server: Server | None = None,
    ):
        self.config, self.replica, self.model_path = config, replica, Path(model_path)
        self.bucket_bytes = config.checkpoint_engine.update_weights_bucket_megabytes << 20
        self.dtype = rollout_dtype(config.dtype)
        self._version, self._asleep = 0, False
        self._pending: dict[int, Future[Any]] = {}
        self._token_callbacks: dict[int, Callable[..., object]] = {}
        self._last_call_id = 0
        self._lock = threading.Lock()
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # a server that hangs reads nothing
        self._num_transfers = 0  # steps of a weight transport in progress: these wait for the trainer
        self._progress: Progress | None = None  # since it was asked for a sign of life
        self._silent_s = 0.0
        self._given_up = ""
        self._together: list[_Call] = []  # requests of this turn of the event loop
        if server is None:
            server = LocalServer(config.server.python, get_platform().rollout_environment(devices))
        self.server: Server = server
        self._reader = threading.Thread(target=self._read_replies, name=f"rollout replica {replica}", daemon=True)
        self._reader.start()
        self._stop = weakref.finalize(self, self.server.stop)
        self._started = self._call(
            "start", config=config, model_path=str(model_path), eos_token_ids=list(eos_token_ids), replica=replica
        )
        self._start_ends = time.monotonic() + config.server.max_start_wait_time

    @property
    def has_started(self) -> bool:  # type: ignore[override]
        return self._started.done() or time.monotonic() > self._start_ends

    def wait_until_ready(self) -> None:
        try:
            self._started.result(max(self._start_ends - time.monotonic(), 0))
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
            call = [self._last_call_id, method, arguments]
            if method == "generate":
                self._together.append(call)
            else:
                self._send(call)
        if self.lost is not None:
            self._fail_all(self.lost)
        return future

    def _send(self, *calls: _Call) -> None:
        """Send what waits to be sent together, and then `calls`; with the lock held."""
        waiting, self._together = self._together, []
        if self.lost is not None:
            return
        if waiting:
            self._outgoing.put(encode_frame([_SIGN_OF_LIFE, "together", {"calls": waiting}]))
        for call in calls:
            self._outgoing.put(encode_frame(call))

    def _send_together(self) -> None:
        with self._lock:
            self._send()

    async def _call_async(self, method: str, **arguments: Any) -> Any:
        return await asyncio.wrap_future(self._call(method, **arguments))

    def _write_calls(self, connection: socket.socket) -> None:
        """Sends calls in a separate thread, in their order; returns when the server ends."""
        with contextlib.suppress(OSError):  # the reader notices it after the pending replies
            while (frame := self._outgoing.get()) is not None:
                connection.sendall(frame)

    def _read_replies(self) -> None:
        """Connects and consumes replies in a separate thread; returns when the server ends."""
        for frame in self._frames():
            call_id, succeeded, result = deserialize(frame)
            if call_id == _SIGN_OF_LIFE:
                continue
            if succeeded is None:
                self._token_callbacks[call_id](*result)
                continue
            self._token_callbacks.pop(call_id, None)
            future = self._pending.pop(call_id)
            if succeeded:
                future.set_result(result)
            else:
                future.set_exception(self._to_exception(*result))
        self._outgoing.put(None)
        how = self.server.how_it_ended(self._given_up)
        with self._lock:
            self.lost = how
        self._fail_all(how)

    def _frames(self) -> Iterator[bytes]:
        """Yields the server's messages until it ends; looks after it while nothing comes."""
        try:
            connection = self.server.connect()
            name = f"calls of rollout replica {self.replica}"
            threading.Thread(target=self._write_calls, args=(connection,), name=name, daemon=True).start()
            while len(header := self._receive(connection, HEADER_BYTES)) == HEADER_BYTES:
                frame = self._receive(connection, size := frame_bytes(header))
                if len(frame) < size:
                    return
                yield frame
        except ConnectionError:  # of a server that ends before it has read all calls
            return
        except (VerlError, OSError) as error:
            self._give_up(str(error))

    def _receive(self, connection: socket.socket, size: int) -> bytes:
        """The next `size` bytes; fewer where the connection ends."""
        parts, pause_s, readable = bytearray(size), self.config.server.timeout / 4, select.poll()
        readable.register(connection, select.POLLIN)
        num_read = 0
        while num_read < size:
            while not readable.poll(pause_s * 1000):
                self._look_after(pause_s)
            if not (count := connection.recv_into(memoryview(parts)[num_read:])):
                break
            num_read += count
        self._progress = None
        return bytes(parts[:num_read])

    def _look_after(self, elapsed_s: float) -> None:
        """End a server that gives no sign of life and does not move, so that others can answer its calls. VerlError
        where its machine is lost.

        One that starts or waits for the trainer's weights is left alone: these waits have limits of their own.
        """
        now = self.server.look()
        if now is None or not self._pending or self._num_transfers or not self._started.done():
            self._progress = None
            return
        if self._progress is None:
            self._progress, self._silent_s = Progress(now), 0.0
            self._outgoing.put(encode_frame([_SIGN_OF_LIFE, "stats", {}]))
            return
        self._progress.update(now, elapsed_s)
        self._silent_s += elapsed_s
        timeout_s, still_s = self.config.server.timeout, max(self._progress.quiet_s, self._progress.stopped_s)
        polls = self._silent_s >= COLLECTIVE_TIMEOUT.total_seconds()
        if polls or (still_s >= timeout_s and not self.server.waits_for_disk()):
            what = "it is stopped: somebody sent it SIGSTOP" if now.state == "T" else f"state {now.state}"
            self._give_up(
                f"{self.server.name} gave no sign of life for {self._silent_s:.0f} s and used no CPU time for "
                f"{still_s:.0f} s, while {len(self._pending)} calls waited "
                f"(actor_rollout_ref.rollout.server.timeout={timeout_s:g}); {what}. It was killed"
            )

    def _give_up(self, why: str) -> None:
        self._given_up = self._given_up or why
        self.server.kill()

    def _to_exception(self, kind: str, message: str) -> VerlError:
        if kind == "StaleWeightsError":
            return StaleWeightsError(message)
        error_class = getattr(errors, kind, None) if kind else None
        if error_class in (None, WorkerError, ReplicaError):
            return self._failure("generate", message)
        return error_class(message)

    def _fail_all(self, how: str) -> None:
        with self._lock:
            waiting, self._pending = self._pending, {}
        for future in waiting.values():
            future.set_exception(self._failure("generate", how))

    def _failure(self, method: str, message: str) -> ReplicaError:
        return ReplicaError(self.replica, method, f"rollout replica {self.replica}: {message}")

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """Requests of one turn of the event loop reach the server together, so that it begins with all of them."""
        if not self._together:
            asyncio.get_running_loop().call_soon(self._send_together)
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

    async def park(self) -> None:
        await self._call_async("park")

    async def resume(self) -> None:
        await self._call_async("resume")

    async def in_flight(self) -> list[GenerationRequest]:
        return await self._call_async("in_flight")

    async def begin_update(self) -> None:
        await self._call_async("begin_update")

    async def transport_step(self, step: str, argument: Any) -> list[Any]:
        self._num_transfers += 1
        try:
            return await self._call_async("transport_step", step=step, argument=argument)
        finally:
            self._num_transfers -= 1

    async def finish_update(self, version: int) -> None:
        self.read_back = await self._call_async("finish_update", version=version)
        self._version = version

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self._call_async("compute_logprobs", sequences=[list(ids) for ids in sequences])

    async def sleep(self) -> None:
        self._asleep = True
        await self._call_async("sleep")

    async def sleep_until_update(self) -> None:
        self._asleep = True
        await self._call_async("sleep_until_update")

    async def set_profiling(self, on: bool) -> None:
        await self._call_async("set_profiling", on=on)

    async def wake(self) -> None:
        if self._asleep:
            await self._call_async("wake")
        self._asleep = False

    async def stats(self) -> list[EngineStats]:
        return await self._call_async("stats")

    def close(self) -> None:
        """End the process, and what reads from it: it asks the process's machine how it ended, while that is there."""
        self._stop()
        self._reader.join(_CLOSE_S)
