"""Adds `processor_s` to every test of a --junitxml: what this process and all that it started computed meanwhile."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def tree_s(pid: int) -> float:
    """Processor seconds of `pid`, of the processes below it, and of those below it that ended."""
    return sum(sum(map(int, stat[11:15])) for stat in _stats(pid)) / TICKS_PER_S


def _stats(pid: int) -> Iterator[list[str]]:
    try:
        yield Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        below = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # it has just ended
        return
    for child in below.split():
        yield from _stats(int(child))


class ProcessorTimes:
    """The hooks; `tests/conftest.py` registers them where a --junitxml is asked for."""

    before_s = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        self.before_s = tree_s(os.getpid())
        yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            yield
        finally:
            item.user_properties.append(("processor_s", f"{tree_s(os.getpid()) - self.before_s:.2f}"))
