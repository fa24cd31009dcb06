"""Requests to a rollout server that speaks JSON over HTTP, from any event loop."""

import asyncio
import weakref
from concurrent.futures import Future
from typing import Any

from verl.config.rollout import ServerConfig
from verl.runtime.event_loop import EventLoopThread
from verl.utils.errors import ConfigError, WorkerError


class HTTPClient:
    """HTTP requests with the retries of `rollout.server.*`. Errors name the server, the path and the response.

    The connections use a separate event loop, in a thread that ends with the client.
    """

    def __init__(self, url: str, server: ServerConfig):
        try:
            import aiohttp
        except ImportError as error:
            raise ConfigError("rollout servers over HTTP need aiohttp: pip install -e '.[serve]'") from error
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"actor_rollout_ref.rollout.server.url={url} must begin with http:// or https://")
        self.aiohttp, self.server = aiohttp, server
        self.url, self.max_attempts, self.retry_delay = url.rstrip("/"), server.max_attempts, server.retry_delay
        self._loop = EventLoopThread(f"http to {url}")
        self._session = self._loop.run(self._open())
        weakref.finalize(self, _close, self._loop, self._session)

    async def _open(self) -> Any:
        connector = self.aiohttp.TCPConnector(limit=self.server.max_connections)
        timeout = self.aiohttp.ClientTimeout(total=None, sock_connect=self.server.timeout)
        return self.aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded response. Failed connections are retried; error responses of the server are not."""
        return await asyncio.wrap_future(self._submit(method, path, body))

    def call_blocking(self, method: str, path: str, body: Any = None) -> Any:
        """`call`, for code outside of an event loop."""
        return self._submit(method, path, body).result()

    def _submit(self, method: str, path: str, body: Any) -> "Future[Any]":
        return self._loop.start(self._call(method, path, body))

    async def _call(self, method: str, path: str, body: Any) -> Any:
        problem: Exception | None = None
        for attempt in range(self.max_attempts):
            if attempt:
                await asyncio.sleep(self.retry_delay)
            try:
                async with self._session.request(method, self.url + path, json=body) as reply:
                    if reply.status >= 400:
                        text = (await reply.text())[:500]
                        raise WorkerError(0, path, f"{self.url}{path} answered {reply.status}: {text}")
                    if reply.content_type == "application/json":
                        return await reply.json()
                    return await reply.text()
            except self.aiohttp.ClientConnectionError as error:
                problem = error
            except (self.aiohttp.ClientError, ValueError) as error:  # truncated, or not valid JSON
                raise WorkerError(0, path, f"{self.url}{path} gave no answer that can be read: {error!r}") from error
        raise WorkerError(
            0, path,
            f"no answer from {self.url}{path} in {self.max_attempts} attempts ({problem}); is the server still "
            "running? look at its log, or raise rollout.server.max_attempts",
        )  # fmt: skip


def _close(loop: EventLoopThread, session: Any) -> None:
    """Close the connections, then end the thread."""

    async def end() -> None:
        await session.close()
        asyncio.get_running_loop().stop()

    loop.start(end())
