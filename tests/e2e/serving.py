"""`verl serve` in a thread of the test."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from aiohttp import web

from verl.commands.serve.server import OpenAIServer


@contextlib.contextmanager
def serving(server: OpenAIServer) -> Iterator[str]:
    """The address of `server`, which ends with the block."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(server.application(), handler_cancellation=True)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner.addresses[0][1]

    port = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
