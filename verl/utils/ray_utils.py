"""`get_event_loop`, where published workers import it."""

import asyncio


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The running event loop; without one a new loop, which becomes the current one of this thread."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        asyncio.set_event_loop(loop := asyncio.new_event_loop())
        return loop
