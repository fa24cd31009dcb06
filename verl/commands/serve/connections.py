"""The listening socket of the server: clients that send nothing or read nothing are let go, and a stop is quick."""

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
import time
import zlib
from typing import Any

from aiohttp import web

from verl.commands.serve.address import bound_sockets, connections_that_fit
from verl.commands.serve.request_body import RequestError

logger = logging.getLogger(__name__)
GRACE_S = 2.0  # running requests may finish within it when the server stops
_KEEPALIVE_S = 75.0  # an idle connection between two requests
_BACKLOG = 128  # clients that the system lets wait
_SAY_EVERY_S = 60.0
_RETRY_S = 0.5  # after a client could not be accepted


class Connection(asyncio.Protocol):
    """One client's connection, handled by `inner`; it ends when nothing moves on it for `limit_s` seconds.

    `inner` limits the time of a body and of idleness between requests. Here the first request's head must arrive in
    time, and what is written must be read.
    """

    def __init__(self, inner: Any, limit_s: float, connections: "set[Connection]"):
        self.inner, self.limit_s, self.connections = inner, limit_s, connections
        self.transport: Any = None
        self.timer: asyncio.TimerHandle | None = None
        self.head_end, self.has_head = b"", False
        self.unread_bytes, self.since = 0, 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.connections.add(self)
        self.since = asyncio.get_running_loop().time()
        self._abort_if_stalled()
        self.inner.connection_made(transport)

    def _abort_if_stalled(self) -> None:
        """End the connection if its client has not moved for the limit; looks again later."""
        loop = asyncio.get_running_loop()
        unread, now = self.transport.get_write_buffer_size(), loop.time()
        waits_for_client = unread > 0 or not self.has_head
        if not waits_for_client or unread < self.unread_bytes:
            self.since = now
        self.unread_bytes = unread
        if now - self.since >= self.limit_s:
            self.transport.abort()
        else:
            self.timer = loop.call_later(self.limit_s / 4, self._abort_if_stalled)

    def data_received(self, data: bytes) -> None:
        if not self.has_head:
            self.head_end += data
            self.has_head = b"\r\n\r\n" in self.head_end
            self.head_end = self.head_end[-3:]
        self.inner.data_received(data)

    def eof_received(self) -> Any:
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.connections.discard(self)
        self.inner.connection_lost(error)


class Listener:
    """An application that listens on one address. `limit_s`: seconds that a client may keep it waiting.

    It holds as many connections as there are descriptors for; more are closed at once, with a line a minute.
    """

    def __init__(self, application: web.Application, limit_s: float):
        self.limit_s = limit_s
        self.runner = web.AppRunner(
            application, handler_cancellation=True, shutdown_timeout=GRACE_S, keepalive_timeout=_KEEPALIVE_S,
            lingering_time=1.0, auto_decompress=False, access_log=None,
        )  # fmt: skip
        self.connections: set[Connection] = set()
        self.accepting: list[asyncio.Task[None]] = []
        self.refused, self.said, self.most = 0, -math.inf, 0

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port."""
        await self.runner.setup()
        sockets = bound_sockets(host, port)
        self.most = connections_that_fit()
        for listening in sockets:
            listening.listen(_BACKLOG)
            listening.setblocking(False)
            self.accepting.append(asyncio.create_task(self._accept(listening)))
        return int(sockets[0].getsockname()[1])

    async def _accept(self, listening: socket.socket) -> None:
        """Accept clients one at a time: asyncio's own server takes a hundred before it counts them."""
        loop, handlers = asyncio.get_running_loop(), self.runner.server
        with listening:
            while True:
                try:
                    client = (await loop.sock_accept(listening))[0]
                    if len(self.connections) < self.most:
                        await loop.connect_accepted_socket(
                            lambda: Connection(handlers(), self.limit_s, self.connections),  # type: ignore[misc]
                            client,
                        )
                        continue
                    client.close()
                except OSError as error:  # descriptors are used up by something else, or the client has left
                    if error.errno not in (errno.EMFILE, errno.ENFILE):
                        continue
                    await asyncio.sleep(_RETRY_S)
                self._say_refused()

    def _say_refused(self) -> None:
        self.refused += 1
        if time.monotonic() - self.said >= _SAY_EVERY_S:
            logger.warning(
                "connections refused: %d; %d are open, and the descriptors of this process (ulimit -n) allow %d",
                self.refused, len(self.connections), self.most,
            )  # fmt: skip
            self.refused, self.said = 0, time.monotonic()

    async def stop(self) -> None:
        """Finish or cut off what runs, within `GRACE_S` seconds and a little, and free the engine."""
        for task in self.accepting:
            task.cancel()
        await self.runner.cleanup()
        for connection in list(self.connections):
            connection.transport.abort()


async def until_stopped() -> None:
    """Return at SIGINT or SIGTERM; a second one has its usual effect."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)


async def read_limited(request: web.Request, limit_s: float, max_bytes: int) -> bytes:
    """The body of a request, decompressed; RequestError where it is too large or does not arrive in time."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise RequestError(f"Content-Encoding {encoding!r:.40} is not one of identity, gzip, deflate", status=415)
    # 47: the header says whether it is gzip or zlib
    unpack = None if encoding == "identity" else zlib.decompressobj(wbits=47)
    body, received = bytearray(), 0
    try:
        async with asyncio.timeout(limit_s):
            async for data in request.content.iter_any():
                received += len(data)
                body += unpack.decompress(data, max_bytes + 1 - len(body)) if unpack else data
                if max(received, len(body)) > max_bytes or (unpack and unpack.unconsumed_tail):
                    raise RequestError(
                        f"the body has more than {max_bytes} bytes, the limit of --max-body-mb (after decompression); "
                        "send less",
                        status=413,
                    )
    except TimeoutError:
        raise RequestError(f"the body did not arrive within {limit_s:g} s; send it faster", status=408) from None
    except zlib.error as error:
        raise RequestError(f"the body is not valid {encoding}: {error}") from error
    if unpack and not unpack.eof:
        raise RequestError(f"the body is not valid {encoding}: it ends too early")
    return bytes(body)


@contextlib.asynccontextmanager
async def listening(application: web.Application, host: str, port: int, limit_s: float) -> Any:
    """The port of an application that listens until the block ends."""
    listener = Listener(application, limit_s)
    try:
        yield await listener.start(host, port)
    finally:
        await listener.stop()
