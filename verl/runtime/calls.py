"""Calls in flight to workers in other processes: what groups of processes and of Ray's actors share."""

import contextlib
import itertools
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, InvalidStateError, wait
from dataclasses import dataclass, field
from typing import Any

from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.rank_server import BUILD_CALL
from verl.utils.errors import WorkerError

GRACE_S = 5.0  # after a failure on one rank: how long the others may still run before they are killed


@dataclass
class _Call:
    """A method call on some ranks: a future for the result of each rank, and the first error."""

    method: str
    futures: dict[int, Future] = field(default_factory=dict)
    first_error: WorkerError | None = None
    sent: float = field(default_factory=time.time)  # seconds since 1970


class RemoteGroup(WorkerGroup):
    """A group whose ranks answer later: it keeps a future for each call of each rank.

    A subclass starts and ends the ranks, sends messages, and tells `_resolve` and `_report_death` what it hears.
    """

    def __init__(self, layout: Layout, name: str):
        self.layout, self.name = layout, name
        self._numbers = itertools.count(BUILD_CALL)
        self._calls: dict[int, _Call] = {}
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # held for one message to all its ranks
        self._failure: WorkerError | None = None
        self._closing = False

    @abstractmethod
    def _pack(self, arguments: list[tuple[Any, ...]]) -> Any:
        """The arguments of several calls, as they travel. Raises NotSerializableError."""

    @abstractmethod
    def _send(self, rank: int, calls: list[tuple[int, str]], body: Any) -> None:
        """Send calls (number, method) with their packed arguments; a rank that has ended is no error here."""

    @abstractmethod
    def _kill_ranks(self) -> None:
        """End all ranks at once."""

    def _find_cause(self, error: WorkerError, since: float, stuck: Sequence[int] = ()) -> WorkerError:
        """The error to raise for `error`: the earliest one of all ranks after the time `since`, if that is known, and
        where the ranks are that are `stuck` since."""
        return error

    def _label(self, rank: int) -> str:
        return f"{self.name} rank {rank}".lstrip()

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        bodies: dict[int, Any] = {}
        for args in arguments:  # a tuple that several ranks get is packed once
            if id(args) not in bodies:
                bodies[id(args)] = self._pack([args])
        number, call = self._register_call(method, range(self.layout.world_size))
        self._send_all([(number, method)], {rank: bodies[id(args)] for rank, args in enumerate(arguments)})
        return self._wait_for_results(call)

    def post(self, rank: int, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Future]:
        body = self._pack(list(arguments))
        calls = [self._register_call(method, [rank]) for _ in arguments]
        self._send_all([(number, method) for number, _ in calls], {rank: body})
        return [call.futures[rank] for _, call in calls]

    def _register_call(self, method: str, ranks: Sequence[int]) -> tuple[int, _Call]:
        call = _Call(method, {rank: Future() for rank in ranks})
        for future in call.futures.values():
            future.set_running_or_notify_cancel()  # it cannot be cancelled: the rank runs the call anyway
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise WorkerError(min(ranks), method, "the group was closed; build a new one")
            number = next(self._numbers)
            self._calls[number] = call
        return number, call

    def _send_all(self, calls: list[tuple[int, str]], body_by_rank: dict[int, Any]) -> None:
        """Send the calls with their arguments; the messages of all threads reach every rank in the same order."""
        with self._sending:
            for rank, body in body_by_rank.items():
                self._send(rank, calls, body)

    def _wait_for_results(self, call: _Call) -> list[Any]:
        """Every rank's result. Raises the first error, and ends the group if ranks hang after it."""
        futures = list(call.futures.values())
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in done):
            wait(futures, timeout=GRACE_S)
            stuck = [rank for rank, future in call.futures.items() if not future.done()]
            if self._failure is not None:
                raise self._failure
            assert call.first_error is not None
            if not stuck:
                raise self._find_cause(call.first_error, call.sent)
            self._fail_and_kill(call.first_error, stuck)
            assert self._failure is not None
            raise self._failure
        return [future.result() for future in futures]

    def _resolve(self, rank: int, number: int, succeeded: bool, value: Any) -> None:
        with self._lock:
            call = self._calls.get(number)
            if call is None:  # it has failed already, because another rank died
                return
            future = call.futures[rank]
            if future.done():
                return
            if not succeeded:
                error = WorkerError(rank, call.method, value)
                call.first_error = call.first_error or error
            if all(other.done() or other is future for other in call.futures.values()):
                del self._calls[number]
        with contextlib.suppress(InvalidStateError):  # the group has failed meanwhile and set the exception
            future.set_result(value) if succeeded else future.set_exception(error)

    def _open_calls(self) -> dict[int, dict[int, str]]:
        """Open calls of each rank: their methods by number, without calls that have failed."""
        found: dict[int, dict[int, str]] = {}
        with self._lock:
            for number, call in self._calls.items():
                for rank, future in call.futures.items():
                    if not future.done() and call.first_error is None:
                        found.setdefault(rank, {})[number] = call.method
        return found

    def _is_ending(self, rank: int) -> bool:
        """Whether the end of `rank` was to be expected; its calls then fail here."""
        if self._failure is None and self._closing:
            self._fail_calls_of(rank, "the group was closed before it answered")
        return self._failure is not None or self._closing

    def _report_death(self, rank: int, reason: str) -> None:
        """Fail the group because `rank` has ended; the error names the call that it ran."""
        with self._lock:
            running = [call.method for call in self._calls.values() if rank in call.futures]
        self._fail_and_kill(WorkerError(rank, running[0] if running else "between calls", reason, is_death=True))

    def _fail_calls_of(self, rank: int, reason: str) -> None:
        """Fail the calls that `rank` has not answered, which other threads may wait for."""
        with self._lock:
            waiting = [number for number, call in self._calls.items() if rank in call.futures]
        for number in waiting:
            self._resolve(rank, number, False, reason)

    def _fail_and_kill(self, error: WorkerError, stuck: Sequence[int] = ()) -> None:
        """Fail every call in flight with the cause of `error`, and kill every process."""
        with self._lock:
            since = min((call.sent for call in self._calls.values()), default=time.time())
        cause = self._find_cause(error, since, stuck)
        with self._lock:
            if self._failure is not None:
                return
            self._failure = cause
            unanswered = [f for call in self._calls.values() for f in call.futures.values() if not f.done()]
            self._calls.clear()
        self._kill_ranks()
        for future in unanswered:
            with contextlib.suppress(InvalidStateError):  # its reply arrived meanwhile
                future.set_exception(cause)
