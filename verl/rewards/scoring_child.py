"""The process of a reward function: it makes one call after another, and answers in JSON.

Started by `scoring_process`, over a socket that no other process holds, or as an actor of Ray. It loads the function
and what that imports, but not torch.
"""

import asyncio
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any

from verl.rewards.base import NoScorerError
from verl.rewards.bounded_calls import check_signature, is_async
from verl.rewards.scorer_lookup import score_row
from verl.utils.errors import VerlError
from verl.utils.external_code import load_object, user_traceback


@dataclass(frozen=True)
class ScorerSource:
    """Where a process finds the function, and what that gets with every call."""

    path: str | None  # None: the built-in scorers
    name: str
    kwargs: dict[str, Any]
    search_path: tuple[str, ...]  # sys.path of the driver


class ScoringChild:
    """The function of `source`; ConfigError where it cannot be loaded or called."""

    def __init__(self, source: ScorerSource):
        sys.path[:] = [*source.search_path, *(one for one in sys.path if one not in source.search_path)]
        self._function: Callable[..., Any] = score_row
        if source.path is not None:
            self._function = load_object(source.path, source.name, "reward.custom_reward_function")
        self._kwargs = source.kwargs
        check_signature(self._function, source.name, source.kwargs)
        self._loop = asyncio.new_event_loop() if is_async(self._function) else None

    def call(self, kwargs: dict[str, Any]) -> bytes:
        """`{"result": ...}` of the function, or `{"error": ..., "traceback": ..., "is_final": ...}`."""
        try:
            result = self._function(**kwargs, **self._kwargs)
            if self._loop is not None:
                result = self._loop.run_until_complete(result)
        except BaseException as error:  # also SystemExit
            return _failure(error, isinstance(error, NoScorerError | VerlError))
        try:
            return json.dumps({"result": result}, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            return _failure(TypeError(f"what it returned cannot leave its process: {error}"), is_final=True)


def _failure(error: BaseException, is_final: bool) -> bytes:
    traceback = "" if error.__traceback__ is None or is_final else user_traceback(error)
    return json.dumps(
        {"error": f"{type(error).__name__}: {error}", "traceback": traceback, "is_final": is_final}
    ).encode()


def _plain(value: Any) -> Any:
    """Numbers, arrays and tensors of other libraries as JSON holds them."""
    if isinstance(value, Real):
        return float(value)
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no number, text, list or dict")


def main() -> None:
    """Serve the connection whose descriptor is the first argument, until it is closed."""
    connection = Connection(int(sys.argv[1]))
    try:
        child = ScoringChild(connection.recv())
    except BaseException as error:  # also SystemExit of the user's file
        text = str(error) if isinstance(error, VerlError) else f"{type(error).__name__}: {error}"
        connection.send_bytes(json.dumps({"error": text}).encode())
        return
    connection.send_bytes(b'{"result": "ready"}')
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while True:  # in the main thread, where the function may also set an alarm
        request = requests.get()
        failed = isinstance(request, Exception)
        connection.send_bytes(_failure(request, is_final=True) if failed else child.call(request))


def _receive(connection: Connection, requests: "queue.SimpleQueue[Any]") -> None:
    """End this process, and what it has started, with the driver, also during a call."""
    while True:
        try:
            requests.put(connection.recv())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)
        except Exception as error:  # an object whose class this process cannot import
            requests.put(error)


if __name__ == "__main__":
    main()
