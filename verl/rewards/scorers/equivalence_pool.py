"""Symbolic comparison of two formulas in processes that can be killed.

math-verify can loop for ever inside C code, where neither a thread nor a signal handler could stop it, and its own
limit is an alarm, which works in the main thread only. So a few child processes compare, one pair at a time each.
"""

import contextlib
import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from verl.rewards.worker_slots import OfProcess, WorkerSlots
from verl.utils.errors import ConfigError

LIMIT_S = 2.0  # processor seconds of one comparison
WALL_FACTOR = 5  # a comparison on a busy machine gets this many times the limit on the clock
START_LIMIT_S = 120.0
MAX_CHILDREN = 4
INSTALL = "install the extra `math`: pip install -e '.[math]' in the checkout of verl (math-verify with antlr4_9_3)"
_CHILD_FILE = Path(__file__).with_name("equivalence_child.py")


class ComparisonKilledError(Exception):
    """The child was killed at the limit, or died."""


def check_math_is_installed() -> None:
    """ConfigError that names the extra, where math-verify is missing."""
    if not _is_installed():
        raise ConfigError(f"mathematical answers are compared by math-verify, which is not installed; {INSTALL}")


@functools.cache
def _is_installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("math_verify", "latex2sympy2_extended"))


class EquivalencePool:
    """At most `size` children, which start on first use. Any number of threads may call `compare`."""

    def __init__(self, size: int | None = None, limit_s: float = LIMIT_S):
        self._limit_s = limit_s
        self.timeouts = 0  # comparisons that were killed
        self._count_lock = threading.Lock()
        self._slots: WorkerSlots[_Child] = WorkerSlots(size or max(1, min(MAX_CHILDREN, os.cpu_count() or 1)))

    def compare(self, gold: str, answer: str) -> bool | None:
        """Whether two LaTeX formulas are equal; None where the comparison was killed or ran out of memory."""
        child = self._slots.take()
        try:
            child = child or _Child()
            return child.compare(gold, answer, self._limit_s)
        except ComparisonKilledError:
            assert child is not None
            child.kill()
            child = None
            child = _Child()  # starts while nobody waits
            with self._count_lock:
                self.timeouts += 1
            return None
        except BaseException:  # its reply may still come, and would be taken for that of the next pair
            if child is not None:
                child.kill()
                child = None
            raise
        finally:
            self._slots.put_back(child)

    def close(self) -> None:
        """Kill the children that are free; a later comparison starts new ones."""
        for child in self._slots.clear():
            child.kill()


class _Child:
    """One process that compares formulas; ConfigError of the first comparison when it cannot start."""

    def __init__(self) -> None:
        check_math_is_installed()
        # Same order of sets in every child, so that the same pair takes the same way through sympy.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_CHILD_FILE)],  # -P: the folder's own code.py is not the library's
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        self._is_ready = False

    def _wait_until_ready(self) -> None:
        try:
            started = self._read_reply(limit_s=START_LIMIT_S, processor_limit_s=START_LIMIT_S)
        except ComparisonKilledError as error:
            raise ConfigError(f"the process that compares formulas did not start: {error}; {INSTALL}") from error
        if "error" in started:
            raise ConfigError(f"the process that compares formulas cannot start: {started['error']}; {INSTALL}")
        self._is_ready = True

    def compare(self, gold: str, answer: str, limit_s: float) -> bool | None:
        assert self._process.stdin is not None
        if not self._is_ready:
            self._wait_until_ready()
        try:
            self._process.stdin.write(json.dumps({"gold": gold, "answer": answer}).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise ComparisonKilledError("it is gone") from error
        return self._read_reply(limit_s * WALL_FACTOR, limit_s)["equal"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a request that was never read
                    pipe.close()

    def _read_reply(self, limit_s: float, processor_limit_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        number, reply = self._process.stdout.fileno(), b""
        poll = select.poll()
        poll.register(number, select.POLLIN)
        end, used_before = time.monotonic() + limit_s, _processor_seconds(self._process.pid)
        while not reply.endswith(b"\n"):
            left_s = min(
                end - time.monotonic(), processor_limit_s + used_before - _processor_seconds(self._process.pid)
            )
            if left_s <= 0:
                raise ComparisonKilledError(f"no reply after {processor_limit_s} s")
            if poll.poll(max(1, 1000 * left_s)):
                received = os.read(number, 1 << 16)
                if not received:
                    raise ComparisonKilledError("it died")
                reply += received
        return json.loads(reply)


def _processor_seconds(pid: int) -> float:
    """What a process has used so far, so that a busy machine kills no comparison that is fast; else the clock."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of that process
    return time.monotonic()


shared_pool = OfProcess(lambda: EquivalencePool())  # the pool of this process
