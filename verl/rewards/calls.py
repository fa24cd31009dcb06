"""Calls of a reward function: what they get, what becomes of them, and how they fail."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.utils.errors import ConfigError

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of a reward function, by name
BEAT_S = 0.25  # between two signs of life of its process, at most
GENERATORS = "generators of its process"  # the one argument of a call that only exchanges their states
PLURALS = {  # of one that scores several answers in one call
    "data_source": "data_sources",
    "solution_str": "solution_strs",
    "ground_truth": "ground_truths",
    "extra_info": "extra_infos",
}


@dataclass(frozen=True)
class ManagerSource:
    """A user's manager class, and what its instance is made with."""

    path: str
    name: str
    config: Any
    tokenizer: Any
    keywords: dict[str, Any]


@dataclass(frozen=True)
class ScorerSource:
    """Where a process finds the function, and what that gets with every call."""

    path: str | None  # None: the built-in scorers
    name: str
    kwargs: dict[str, Any]
    search_path: tuple[str, ...]  # sys.path of the driver
    num_threads: int = 1
    timeout_s: float | None = None
    is_batched: bool = False
    manager: ManagerSource | None = None

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life: at least four for a limit."""
        return BEAT_S if self.timeout_s is None else min(BEAT_S, self.timeout_s / 4)


class RewardTimeoutError(Exception):
    """A reward call took longer than its limit."""


class BlockedLoopError(RuntimeError):
    """An async function blocks the event loop of its process."""


class RemoteCallError(Exception):
    """A call that failed in another process, as the text of its error; `is_final`: another attempt cannot repair it."""

    def __init__(self, summary: str, traceback: str = "", is_final: bool = False):
        super().__init__(summary)
        self.summary, self.traceback, self.is_final = summary, traceback, is_final


class ProcessLostError(Exception):
    """The process of a call ended; another takes its place."""


class ProcessKilledError(RewardTimeoutError, ProcessLostError):
    """The process of a call was killed at the limit."""


@dataclass(frozen=True)
class Outcome:
    """The result of one call, or its error."""

    result: Any = None
    error: BaseException | None = None
    earlier: tuple[BaseException, ...] = ()  # errors of the attempts before it


class Calls(Protocol):
    """Makes calls of a function."""

    async def call(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Outcomes of one call per dict of keyword arguments, in that order."""


class Executor(Calls, Protocol):
    """Makes calls of a user's function, in another process or here."""

    @property
    def is_async(self) -> bool:
        """Whether the function is async."""
        ...


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` returns a coroutine; also right for callable objects and partials."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def limit_text(timeout_s: float | None) -> str:
    """The error of a call beyond its limit, in words."""
    return f"no result after reward.timeout_s={timeout_s} seconds of running"


def check_signature(function: Callable[..., Any], name: str, kwargs: Mapping[str, Any], is_batched: bool) -> None:
    """ConfigError when the function cannot take the keywords it will be called with: those of rows, and `kwargs`."""
    arguments = tuple(PLURALS.values()) if is_batched else ARGUMENTS
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # built-in callables have none
        return
    keywords = dict.fromkeys([*arguments, *kwargs])
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise ConfigError(
            f"reward function {name}{signature} cannot be called with the keywords {', '.join(keywords)}: {error}. "
            f"Define it as compute_score({', '.join(arguments)}=None, **kwargs)"
        ) from error
