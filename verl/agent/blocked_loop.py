"""Names the agent loop of others that blocks the event loop: a thread looks, since nothing else can run meanwhile."""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)

BLOCKED_S = 60.0  # said after so long where the loop has no limit on its time
_TICK_S = 0.25


class BlockWatch:
    """Watches one event loop while conversations are in it; every conversation calls `beat` as long as it can run."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop, self.thread_id = loop, threading.get_ident()
        self.tasks: dict[Any, tuple[str, float]] = {}  # what it is, and seconds after which it is said
        self.silent_s = 0.0
        self.said: Any = None  # the task that was named last
        threading.Thread(target=self._watch, name="blocked loops", daemon=True).start()

    def beat(self) -> None:
        self.silent_s, self.said = 0.0, None

    def _watch(self) -> None:
        while self.tasks or not self.loop.is_closed():
            time.sleep(_TICK_S)
            self.silent_s += _TICK_S  # in slices, so that a process that was stopped is not blamed on a loop
            task = asyncio.current_task(self.loop)
            what, limit_s = self.tasks.get(task, ("", 0.0))
            if what and self.silent_s >= limit_s and task is not self.said:
                self.said = task
                logger.warning(
                    "%s has blocked the event loop for %g seconds, at %s: all other conversations wait for it. Await "
                    "what it waits for (asyncio.sleep, an asynchronous client, asyncio.to_thread); Ctrl-C twice ends "
                    "the run at once", what, self.silent_s, self._place(),
                )  # fmt: skip

    def _place(self) -> str:
        frame = sys._current_frames().get(self.thread_id)
        stack = traceback.extract_stack(frame) if frame else []
        return f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}" if stack else "an unknown place"


_watches: dict[int, BlockWatch] = {}  # by id of the event loop


@contextlib.contextmanager
def watched(task: "asyncio.Task[Any]", what: str, limit_s: float | None) -> Iterator[BlockWatch]:
    """Inside the block, `task` is named by `what` in a warning when it keeps the event loop for `limit_s` or longer."""
    loop = asyncio.get_running_loop()
    for closed in [key for key, watch in _watches.items() if watch.loop.is_closed()]:
        del _watches[closed]
    watch = _watches.get(id(loop)) or BlockWatch(loop)
    _watches[id(loop)] = watch
    watch.tasks[task] = (what, BLOCKED_S if limit_s is None else limit_s)
    watch.beat()
    try:
        yield watch
    finally:
        del watch.tasks[task]
