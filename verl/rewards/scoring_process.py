"""A reward function in processes of its own: what it does to a process, the trainer's does not feel."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from socket import socketpair
from typing import Any, Protocol

import verl
from verl.rewards.bounded_calls import ProcessKilledError, ProcessLostError, RemoteCallError, limit_text
from verl.rewards.scoring_child import ScorerSource, ScoringChild
from verl.rewards.worker_slots import WorkerSlots
from verl.utils.errors import ConfigError

START_LIMIT_S = 300.0  # of a process that loads the function, and what that imports
MAX_REPLY_BYTES = 64 << 20


class Child(Protocol):
    """A process that has loaded the function."""

    def call(self, kwargs: dict[str, Any], limit_s: float | None) -> dict[str, Any]:
        """The reply of `ScoringChild.call`; ProcessLostError or ProcessKilledError, after which it must be replaced."""

    def kill(self) -> None:
        """End it, and what it has started, at once."""


class LocalChild:
    """A process of this machine; ConfigError where it cannot load the function."""

    def __init__(self, source: ScorerSource):
        ours, theirs = socketpair()
        self._connection = Connection(ours.detach())
        paths = [str(Path(verl.__file__).parent.parent), os.environ.get("PYTHONPATH")]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with theirs:  # a process group of its own: Ctrl-C is for the trainer
            self._process = subprocess.Popen(
                [sys.executable, "-m", "verl.rewards.scoring_child", str(theirs.fileno())],
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, process_group=0,
            )  # fmt: skip
        try:
            started = self._ask(ForkingPickler.dumps(source), START_LIMIT_S)
        except ProcessLostError as error:
            self.kill()
            raise ConfigError(f"the process of reward function {source.name} ({source.path}): {error}") from error
        if "error" in started:
            self.kill()
            raise ConfigError(f"in a process of its own: {started['error']}")

    def call(self, kwargs: dict[str, Any], limit_s: float | None) -> dict[str, Any]:
        try:
            request = ForkingPickler.dumps(kwargs)
        except Exception as error:  # of an object that an agent loop added
            return {"error": f"the row cannot travel to another process: {error}", "traceback": "", "is_final": True}
        return self._ask(request, limit_s)

    def _ask(self, request: Any, limit_s: float | None) -> dict[str, Any]:
        # Poll intervals are added up, not the clock: a suspended process is not late.
        poll_s, used_s = (None, 0.0) if limit_s is None else (min(0.25, limit_s / 4), 0.0)
        try:
            self._connection.send_bytes(request)
            while not self._connection.poll(poll_s):
                used_s += poll_s or 0.0
                if limit_s is not None and used_s >= limit_s:
                    raise ProcessKilledError(limit_text(limit_s))
            return dict(json.loads(self._connection.recv_bytes(MAX_REPLY_BYTES)))
        except (EOFError, OSError):
            code = self._process.wait()
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ProcessLostError(f"it ended with {how} during the call") from None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


class RayChild:
    """An actor of Ray on any node, which takes no core from the ranks; VerlError where it cannot load the function."""

    def __init__(self, source: ScorerSource):
        from verl.runtime.ray_objects import FreeActor

        self._actor = FreeActor(ScoringChild, source)

    def call(self, kwargs: dict[str, Any], limit_s: float | None) -> dict[str, Any]:
        try:
            return dict(json.loads(self._actor.call("call", kwargs, limit_s=limit_s)))
        except TimeoutError:
            raise ProcessKilledError(limit_text(limit_s)) from None
        except EOFError as error:
            raise ProcessLostError(f"its actor of Ray ended during the call: {error}") from None

    def kill(self) -> None:
        self._actor.end()


class ProcessFunction:
    """Calls of the function in at most `size` processes, which start on first use; any number of threads may call.

    A process that ends, or does not answer in `limit_s`, is an error of its call, and is replaced at the next.
    """

    def __init__(self, start: Callable[[], Child], size: int, limit_s: float | None, first: Child | None = None):
        self._start, self._limit_s = start, limit_s
        self._slots = WorkerSlots(size, first)
        self._children: set[Child] = {first} if first else set()
        self._lock = threading.Lock()
        _running.add(self)

    def __call__(self, **kwargs: Any) -> Any:
        child = self._slots.take()
        try:
            child = child or self._add()
            reply = child.call(kwargs, self._limit_s)
        except BaseException:  # its reply may still come, and would be taken for that of the next call
            if child is not None:
                self._remove(child)
                child = None
            raise
        finally:
            with self._lock:  # one that was ended meanwhile is not put back
                self._slots.put_back(child if child in self._children else None)
        if "error" in reply:
            raise RemoteCallError(reply["error"], reply["traceback"], reply["is_final"])
        return reply["result"]

    def _add(self) -> Child:
        child = self._start()
        with self._lock:
            self._children.add(child)
        return child

    def _remove(self, child: Child) -> None:
        with self._lock:
            is_ours = child in self._children
            self._children.discard(child)
        if is_ours:
            child.kill()

    def close(self) -> None:
        """End all processes; a call that runs fails, and a later one starts another."""
        with self._lock:
            children, self._children = self._children, set()
            self._slots.clear()
        for child in children:
            child.kill()


_running: "weakref.WeakSet[ProcessFunction]" = weakref.WeakSet()


def end_scoring_processes() -> None:
    """End those of all rewards of this process, whose runs are over."""
    for function in list(_running):
        function.close()
