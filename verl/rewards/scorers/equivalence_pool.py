"""Symbolic comparison of two formulas in processes that can be killed.

math-verify can loop for ever inside C code, where neither a thread nor a signal handler could stop it, and its own
limit is an alarm, which works in the main thread only. So a few child processes compare, one pair at a time each.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from verl.rewards.worker_slots import OfProcess, WorkerSlots
from verl.runtime.child import AskedChild, ChildLateError, ChildLostError
from verl.utils.cores import num_cores
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
        self._slots: WorkerSlots[_Child] = WorkerSlots(size or min(MAX_CHILDREN, num_cores()))

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
        command = [sys.executable, "-P", str(_CHILD_FILE)]  # -P: the folder's own code.py is not the library's
        self._asked, self._is_ready = AskedChild(command, environment, subprocess.DEVNULL), False

    def _wait_until_ready(self) -> None:
        try:
            started = json.loads(self._asked.receive(START_LIMIT_S))
        except (ChildLostError, ChildLateError) as error:
            raise ConfigError(f"the process that compares formulas did not start: {error}; {INSTALL}") from error
        if "error" in started:
            raise ConfigError(f"the process that compares formulas cannot start: {started['error']}; {INSTALL}")
        self._is_ready = True

    def compare(self, gold: str, answer: str, limit_s: float) -> bool | None:
        if not self._is_ready:
            self._wait_until_ready()
        request = json.dumps({"gold": gold, "answer": answer}).encode()
        try:
            return json.loads(self._asked.ask(request, limit_s * WALL_FACTOR, limit_s))["equal"]
        except (ChildLostError, ChildLateError) as error:
            raise ComparisonKilledError(str(error)) from error

    def kill(self) -> None:
        self._asked.close()


shared_pool = OfProcess(lambda: EquivalencePool())  # the pool of this process
