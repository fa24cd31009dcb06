"""Which replica of the rollout serves the requests of a group, for the timeline of an asynchronous run."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar

from verl.observe.events import EventLog

_CURRENT: ContextVar["GroupRequests | None"] = ContextVar("requests of this task's group", default=None)


class GroupRequests:
    """Notes `sent` when a replica gets the first request of the group, and `returned` when it has none any more."""

    def __init__(self, events: EventLog, group: int):
        self.events, self.group = events, group
        self._running = Counter[int]()  # by replica

    def follow(self) -> None:
        """From here on all requests of this task, and of those that it starts, are those of the group."""
        _CURRENT.set(self)

    def sent(self, replica: int) -> None:
        self._running[replica] += 1
        if self._running[replica] == 1:
            self.events.add("sent", group=self.group, replica=replica)

    def returned(self, replica: int) -> None:
        self._running[replica] -= 1
        if not self._running[replica]:
            self.events.add("returned", group=self.group, replica=replica)


@contextlib.contextmanager
def served_by(replica: int) -> Iterator[None]:
    """Inside the block a replica serves a request of this task; nothing is noted for tasks that follow no group."""
    if (group := _CURRENT.get()) is None:
        yield
        return
    group.sent(replica)
    try:
        yield
    finally:
        group.returned(replica)
