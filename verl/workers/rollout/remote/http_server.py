"""A program that serves HTTP for a run: started on loopback, waited for, and ended with whoever started it."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from verl.runtime.child import Child, in_words
from verl.utils.errors import TransportError

HOST = "127.0.0.1"
_POLL_S, _EXIT_S = 0.2, 10.0
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_OPENER = build_opener(ProxyHandler({}))  # this machine is never reached by a proxy


def free_port(host: str = HOST) -> int:
    """A port of an address of this machine that nobody listens on."""
    with socket.socket() as trial:
        trial.bind((host, 0))
        return int(trial.getsockname()[1])


class HTTPServerProcess:
    """`command`, which listens on `port` of an address of this machine; `name` is what messages call it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], port: int, host: str = HOST):
        self.name, self.address = name, f"{host}:{port}"
        self.url = f"http://{self.address}"
        watched = [sys.executable, "-m", "verl.workers.rollout.remote.http_server", *command]
        self.child = Child(watched, environment, stdin=subprocess.PIPE, log_prefix="verl-served-")
        self.process = self.child.process

    def wait_until_ready(self, limit_s: float, key: str) -> None:
        """Return when GET /health answers 200. TransportError where it ends before, or takes more than `limit_s`."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise TransportError(f"{self.name} did not start: {self.how_it_ended()}")
            with contextlib.suppress(OSError), _OPENER.open(f"{self.url}/health", timeout=_EXIT_S):
                return
            time.sleep(_POLL_S)
        raise TransportError(f"{self.name} was not ready after {key}={limit_s:g} s: {self.how_it_ended()}")

    async def ask(self, path: str, body: Any, limit_s: float) -> Any:
        """The JSON that POST `path` answers; TransportError, which says how the process ended if it has."""
        return await asyncio.to_thread(self.answer, path, body, limit_s)

    def answer(self, path: str, body: Any, limit_s: float) -> Any:
        """The same, in this thread."""
        request = Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with _OPENER.open(request, timeout=limit_s) as answer:
                data = answer.read()
            return json.loads(data) if data.strip() else None
        except HTTPError as error:
            said = error.read(2000).decode(errors="replace")
            raise TransportError(f"{self.name} refused {path}: {error.code} {said}") from error
        except (URLError, OSError, ValueError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5 * _POLL_S)
            ended = f"; {self.how_it_ended()}" if self.process.poll() is not None else ""
            raise TransportError(
                f"{self.name} gave no answer to {path} (limit {limit_s:g} s): {error}{ended}"
            ) from error

    def how_it_ended(self) -> str:
        """The server's exit code or signal, if it has ended, and its last lines."""
        code = self.process.poll()
        how = "it runs" if code is None else f"it ended with {in_words(code)}"
        return f"{how}; {self.child.last_lines()}"

    def close(self) -> None:
        """End it and all that it has started."""
        self.child.close()


def run_until_left(command: Sequence[str]) -> int:
    """Run `command` until it ends, or until standard input does, as when who has started this process is gone.

    Returns its exit code; a signal that ended it ends this process, too.
    """
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)
    os.set_blocking(0, False)
    while child.poll() is None:
        try:
            left = os.read(0, 1) == b""
        except BlockingIOError:
            left = False
        if left:
            child.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_EXIT_S / 2)
            os.killpg(0, signal.SIGKILL)
        time.sleep(_POLL_S)
    if child.returncode < 0:
        os.kill(os.getpid(), -child.returncode)
    return child.returncode


def _end_with_parent() -> None:
    """Let Linux send this process SIGTERM when its parent is gone, which Ray kills where an actor has started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(run_until_left(sys.argv[1:]))
