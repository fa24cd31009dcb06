"""`verl serve` in a thread of the test."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator

from verl.commands.serve.connections import Listener
from verl.commands.serve.server import OpenAIServer


@contextlib.contextmanager
def serving(server: OpenAIServer) -> Iterator[str]:
    """The address of `server`, which ends with the block."""
    loop = asyncio.new_event_loop()
    listener = Listener(server.application(), server.limits.client_timeout_s)
    port = loop.run_until_complete(listener.start("127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(listener.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
