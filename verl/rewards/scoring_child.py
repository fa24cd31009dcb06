"""The process of a reward function: it makes calls in threads, or in an event loop, and answers in JSON.

Started by `scoring_pool`, over a socket that no other process holds, or as an actor of Ray. It loads the function and
what that imports, but not torch.
"""

import asyncio
import io
import json
import os
import queue
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from numbers import Real
from typing import Any

from verl.rewards.base import NoScorerError
from verl.rewards.calls import GENERATORS, ManagerSource, ScorerSource, check_signature, is_async
from verl.rewards.scorer_lookup import score_row
from verl.utils.errors import ConfigError, VerlError
from verl.utils.external_code import load_object, user_traceback

SEED = 0
KEY = "reward.custom_reward_function"


class ScoringChild:
    """The function of `source`; ConfigError where it cannot be loaded or called."""

    def __init__(self, source: ScorerSource):
        search_in(source.search_path)
        random.seed(SEED)
        self.source, self._kwargs = source, source.kwargs
        self._function: Callable[..., Any] = score_row
        if source.path is not None:
            self._function = load_object(source.path, source.name, KEY)
        if not callable(self._function):
            kind = type(self._function).__name__
            raise ConfigError(f"{KEY}.name={source.name!r} in {source.path} is {kind}, expected a function")
        if source.manager is not None:
            self._function, self._kwargs = self._manager(source.manager), {}
        else:
            check_signature(self._function, f"{source.name} ({source.path})", source.kwargs, source.is_batched)
        if numpy := loaded("numpy", "random"):
            numpy.random.seed(SEED)
        if torch := loaded("torch", "manual_seed"):
            torch.manual_seed(SEED)
        self.is_async = is_async(self._function)
        self._loop: asyncio.AbstractEventLoop | None = None

    def _manager(self, manager: ManagerSource) -> Callable[..., Any]:
        from verl.rewards.manager_class import scorer_of  # loads torch

        return scorer_of(manager, self._function, self.source.kwargs)

    def call(self, row: bytes) -> bytes:
        """`{"result": ...}` of the function, or `{"error": ..., "traceback": ..., "is_final": ...}`."""
        if self.is_async:
            self._loop = self._loop or asyncio.new_event_loop()
            return self._loop.run_until_complete(self.call_async(row))
        try:
            arguments = ForkingPickler.loads(row)
            if GENERATORS in arguments:
                return _success(exchange_generators(arguments[GENERATORS]))
            return _success(self._function(**{**arguments, **self._kwargs}))
        except BaseException as error:  # also SystemExit: it must not end a thread silently
            return _failure(error)

    async def call_async(self, row: bytes) -> bytes:
        """The same of an async function."""
        try:
            arguments = ForkingPickler.loads(row)
            if GENERATORS in arguments:
                return _success(exchange_generators(arguments[GENERATORS]))
            return _success(await self._function(**{**arguments, **self._kwargs}))
        except BaseException as error:  # also CancelledError, if the function itself raises it
            return _failure(error)


def search_in(folders: Sequence[str]) -> None:
    """Look for modules where the driver does."""
    sys.path[:] = [*folders, *(one for one in sys.path if one not in folders)]


def loaded(name: str, attribute: str) -> Any:
    """The module, or None where nobody has imported it (a user's stand-in without `attribute` counts as nothing)."""
    module = sys.modules.get(name)
    return module if hasattr(module, attribute) else None


def exchange_generators(states: str | None) -> str:
    """The states of the generators of `random` and, where loaded, `numpy.random` and torch, in JSON; `states` replace
    them."""
    numpy, torch = loaded("numpy", "random"), loaded("torch", "get_rng_state")
    found: dict[str, Any] = {"python": random.getstate()}
    if numpy:
        name, keys, *rest = numpy.random.get_state()
        found["numpy"] = [name, keys.tolist(), *rest]
    if torch:
        found["torch"] = torch.get_rng_state().numpy().tobytes().hex()
    if states is not None:
        given = json.loads(states)
        version, internal, gauss = given["python"]
        random.setstate((version, tuple(internal), gauss))
        if numpy and "numpy" in given:
            numpy.random.set_state(given["numpy"])
        if torch and "torch" in given:
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(given["torch"]), dtype=torch.uint8))
    return json.dumps(found)


def _success(result: Any) -> bytes:
    if type(result) is dict:
        result = {str(key): value for key, value in result.items()}
    try:
        return b'{"result": %s}' % json.dumps(result, default=_plain).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return _failure(TypeError(f"what it returned cannot leave its process: {error}"))


def _failure(error: BaseException) -> bytes:
    is_ours = isinstance(error, NoScorerError) or error.__traceback__ is None
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException as failed:  # of a user's class
        text = f"{type(error).__name__}: <whose str() raised {type(failed).__name__}>"
    traceback = "" if is_ours else user_traceback(error)
    is_final = is_ours or isinstance(error, VerlError)
    return json.dumps({"error": text, "traceback": traceback, "is_final": is_final}).encode()


def _plain(value: Any) -> Any:
    """Numbers, arrays and tensors of other libraries as JSON holds them; other objects as text."""
    if isinstance(value, Real):
        return float(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    try:
        return repr(value)
    except BaseException as error:
        return f"<{type(value).__name__}, whose repr() raised {type(error).__name__}>"


class _Outbox:
    """Replies to the driver: those that come while one is sent go together. Any number of threads may put one."""

    def __init__(self, connection: Connection):
        self._connection, self._parts, self._sending = connection, deque[bytes](), threading.Lock()

    def put(self, number: int, reply: bytes) -> None:
        """Send the reply to a call; number 0 is a sign of life."""
        self._parts.append(b"[%d,%s]" % (number, reply))
        while self._parts and self._sending.acquire(blocking=False):
            try:
                parts = [self._parts.popleft() for _ in range(len(self._parts))]
                self._connection.send_bytes(b"[%s]" % b",".join(parts))
            finally:
                self._sending.release()


def serve_threads(child: ScoringChild, connection: Connection) -> None:
    """Make calls in as many threads as the source says; one is the main thread, where a function may set an alarm."""
    requests: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
    outbox, dropped = _Outbox(connection), set[int]()

    def take(number: int, row: bytes | None) -> None:
        if row is None:
            dropped.add(number)
        else:
            requests.put((number, row))

    def work() -> None:
        while True:
            number, row = requests.get()
            outbox.put(number, b"null" if number in dropped else child.call(row))

    def beat() -> None:
        while True:
            time.sleep(child.source.beat_s / 2)
            outbox.put(0, b"null")

    own = [work] * (child.source.num_threads - 1) + [beat] * (child.source.timeout_s is not None)
    for run in (lambda: _receive(connection, take), *own):
        threading.Thread(target=run, daemon=True).start()
    work()


async def serve_loop(child: ScoringChild, connection: Connection) -> None:
    """Make all calls at once in this event loop; a call beyond its limit is cancelled.

    Time counts by turns of the loop: one that other calls block makes no call late.
    """
    loop, outbox, limit_s = asyncio.get_running_loop(), _Outbox(connection), child.source.timeout_s
    loop.set_default_executor(ThreadPoolExecutor(child.source.num_threads))  # of what the function hands to threads
    tasks: dict[int, asyncio.Task[bytes]] = {}
    used_s: dict[int, float] = {}
    cancelled: dict[int, bytes] = {}  # what is answered, whatever they return

    def take(number: int, row: bytes | None) -> None:
        if row is not None:
            tasks[number], used_s[number] = loop.create_task(child.call_async(row)), 0.0
            tasks[number].add_done_callback(lambda task: answer(number, task))
        elif number in tasks:
            cancel(number, b"null")

    def answer(number: int, task: asyncio.Task[bytes]) -> None:
        del tasks[number], used_s[number]
        reply = cancelled.pop(number, None)
        outbox.put(number, task.result() if reply is None else reply)

    def cancel(number: int, reply: bytes) -> None:
        cancelled.setdefault(number, reply)
        tasks[number].cancel()

    threading.Thread(
        target=_receive, args=(connection, lambda *one: loop.call_soon_threadsafe(take, *one)), daemon=True
    ).start()
    while True:
        await asyncio.sleep(child.source.beat_s)
        outbox.put(0, b"null")
        for number in list(used_s) if limit_s is not None else ():
            used_s[number] += child.source.beat_s
            if used_s[number] >= (limit_s or 0.0) and number not in cancelled:
                cancel(number, b'{"late": true}')


def _receive(connection: Connection, take: Callable[[int, bytes | None], object]) -> None:
    """End this process, and what it has started, with the driver, also during a call."""
    try:
        while True:
            for number, row in connection.recv():  # None: nobody waits for that call any more
                take(number, row)
    except (EOFError, OSError):
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve the connection whose descriptor is the first argument, until it is closed."""
    connection = Connection(int(sys.argv[1]))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what it prints is not lost when it is killed
    try:
        search_in(connection.recv())  # where the classes of the next one are
        child = ScoringChild(connection.recv())
    except BaseException as error:  # also SystemExit of the user's file
        text = str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}"
        connection.send_bytes(json.dumps({"error": text}).encode())
        return
    connection.send_bytes(json.dumps({"is_async": child.is_async}).encode())
    if child.is_async:
        asyncio.run(serve_loop(child, connection))
    else:
        serve_threads(child, connection)


if __name__ == "__main__":
    main()
