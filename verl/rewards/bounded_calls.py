"""Concurrent calls of a reward function, each with an enforced time limit.

Signals are not used, because they reach the main thread only. A call that does not return stays in its thread, its row
is reported as timed out, and a new thread starts. Time in the queue or in a busy event loop does not count.
"""

import asyncio
import inspect
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from verl.rewards.held_interpreter import held_interpreter
from verl.utils.errors import ConfigError

MAX_ABANDONED_CALLS = 64
_POLL_INTERVAL_S = 0.25
_ASYNC_POLL_INTERVAL_S = 1.0  # longer, because thousands of calls wait at once


ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")  # of a reward function, by name


class RewardTimeoutError(Exception):
    """A reward call took longer than its limit."""


class TooManyHangingCallsError(RuntimeError):
    """Too many calls have not returned, or one blocks the event loop."""


class CallsCancelledError(asyncio.CancelledError):
    """Who waits for calls was cancelled while some ran; `still_run` is done when these have ended."""

    def __init__(self, still_run: Future[None]):
        super().__init__()
        self.still_run = still_run


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
    """What one call returned or raised."""

    result: Any = None
    error: BaseException | None = None
    earlier: tuple[BaseException, ...] = ()  # errors of the attempts before it
    still_runs: Future[None] | None = None  # of a call that was given up: done when it has ended


class Calls(Protocol):
    """Makes calls of a function."""

    async def run(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Outcomes of one call per dict of keyword arguments, in that order."""


class CallPool:
    """Runs the calls of one reward function, sync or async. `timeout_s=None` is no limit.

    Plain functions run in `num_threads` threads; so does what an async one hands to its event loop's executor. Threads
    end with `close`, or with the last reference to the pool, which `function` should not hold; a call that hangs keeps
    its own.
    """

    def __init__(self, function: Callable[..., Any], num_threads: int, timeout_s: float | None):
        self._timeout_s = timeout_s
        kind = _EventLoopThread if is_async(function) else _ThreadPool
        self._threads = kind(function, num_threads, timeout_s)
        self.close = weakref.finalize(self, self._threads.close)
        self.close.atexit = False  # all are daemons

    async def run(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Outcomes (results or errors) of one call per dict of keyword arguments, in that order."""
        if not self.close.alive:
            raise RuntimeError("the threads of this reward are closed")
        with held_interpreter.while_running(self._timeout_s):
            return await self._threads.run(all_kwargs)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling `function` returns a coroutine; also right for callable objects and partials."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@dataclass
class _Job:
    kwargs: dict[str, Any]
    group: "_JobGroup"
    running: bool = False
    used_s: float = 0.0  # sum of poll intervals, not wall time: a suspended process or a busy event loop is not late
    outcome: Outcome | None = None  # set once, by the thread that ran the call or by a timeout


@dataclass
class _JobGroup:
    """Jobs of one `run`, which is woken once for all of them: a wake-up costs more than a short call."""

    loop: asyncio.AbstractEventLoop
    finished: asyncio.Future[None]
    unfinished: int
    awaited: bool = True  # if False, queued jobs are skipped
    num_running: int = 0
    all_ended: Future[None] = field(default_factory=Future)  # if not awaited: the last that ran has ended


class _ThreadPool:
    """Threads that take jobs from one queue. As daemons, they let the process end while a function hangs."""

    def __init__(self, function: Callable[..., Any], num_threads: int, timeout_s: float | None):
        self._function = function
        self._timeout_s = timeout_s
        # At least four polls per limit, as for async functions; no polls without a limit.
        self._poll_s = None if timeout_s is None else min(_POLL_INTERVAL_S, timeout_s / 4)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()  # None: no more will come
        self._lock = threading.Lock()
        self._num_abandoned = 0
        self._threads_to_start = max(1, num_threads)  # they start on first use

    async def run(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        self._start_threads()
        loop = asyncio.get_running_loop()
        group = _JobGroup(loop, loop.create_future(), len(all_kwargs))
        jobs = [_Job(kwargs, group) for kwargs in all_kwargs]
        for job in jobs:
            self._jobs.put(job)
        try:
            while any(job.outcome is None for job in jobs):
                running = [job for job in jobs if job.running]
                await asyncio.wait({group.finished}, timeout=self._poll_s)
                self._abandon_late(running)
            return [job.outcome for job in jobs if job.outcome is not None]
        except asyncio.CancelledError as error:
            if self._leave(group):
                raise CallsCancelledError(group.all_ended) from error
            raise
        finally:
            self._leave(group)

    def _leave(self, group: _JobGroup) -> bool:
        """Start no more of its jobs; whether some run."""
        with self._lock:
            group.awaited = False
            return group.num_running > 0

    def _start_threads(self) -> None:
        with self._lock:
            count, self._threads_to_start = self._threads_to_start, 0
        for _ in range(count):
            threading.Thread(target=self._work, name="reward", daemon=True).start()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                self._jobs.put(None)  # for the next thread
                return
            with self._lock:
                job.running = job.group.awaited
                job.group.num_running += job.running
            if not job.running:
                continue
            outcome = _run_call(self._function, job.kwargs)
            with self._lock:
                job.group.num_running -= 1
                is_last = not (job.group.awaited or job.group.num_running)
                if (given_up := job.outcome) is not None:
                    self._num_abandoned -= 1
                else:
                    job.outcome = outcome
                    job.group.unfinished -= 1
                    if job.group.unfinished == 0 and job.group.awaited:
                        job.group.loop.call_soon_threadsafe(job.group.finished.set_result, None)
            if is_last:
                job.group.all_ended.set_result(None)
            if given_up is not None:
                assert given_up.still_runs is not None
                given_up.still_runs.set_result(None)
                return  # a replacement thread already runs

    def close(self) -> None:
        """Threads end when their calls have."""
        self._jobs.put(None)

    def _abandon_late(self, jobs: Sequence[_Job]) -> None:
        """Count one poll interval for `jobs`, which ran throughout it, and give up those beyond the limit."""
        if self._timeout_s is None or self._poll_s is None:
            return
        with self._lock:
            for job in jobs:
                job.used_s += self._poll_s
                if job.outcome is not None or job.used_s < self._timeout_s:
                    continue
                job.outcome = Outcome(error=_timeout_error(self._timeout_s), still_runs=Future())
                job.group.unfinished -= 1
                self._num_abandoned += 1
                self._threads_to_start += 1
                if self._num_abandoned > MAX_ABANDONED_CALLS:
                    raise TooManyHangingCallsError(f"{self._num_abandoned} calls have not returned and still run")
        self._start_threads()


def _run_call(function: Callable[..., Any], kwargs: dict[str, Any]) -> Outcome:
    try:
        return Outcome(result=function(**kwargs))
    except BaseException as error:  # also SystemExit: user code must not end a worker thread silently
        return Outcome(error=error)


class _EventLoopThread:
    """One event loop in its own thread for the whole run, because the function's sessions and locks are bound to it."""

    def __init__(self, function: Callable[..., Awaitable[Any]], num_threads: int, timeout_s: float | None):
        self._function = function
        self._num_threads, self._timeout_s = num_threads, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._heartbeats = 0  # polls completed by all runs together

    async def run(self, all_kwargs: Sequence[dict[str, Any]]) -> list[Outcome]:
        cancelled, ended = threading.Event(), Future[None]()
        future = asyncio.run_coroutine_threadsafe(self._run_all(all_kwargs, cancelled, ended), self._running_loop())
        waiting, heartbeats, silent_s = asyncio.wrap_future(future), self._heartbeats, 0.0
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=_POLL_INTERVAL_S)
                # Sum of poll intervals, not wall time: a process that was suspended has not been silent.
                silent_s = silent_s + _POLL_INTERVAL_S if self._heartbeats == heartbeats else 0.0
                heartbeats = self._heartbeats
                self._check_blocked(waiting, silent_s)
        except asyncio.CancelledError as error:
            cancelled.set()
            raise CallsCancelledError(ended) from error
        return waiting.result()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # of what the function hands to threads itself, as by asyncio.to_thread
            executor = ThreadPoolExecutor(max(1, self._num_threads))
            self._loop.set_default_executor(executor)
            work = (self._loop, executor)
            threading.Thread(target=_serve, args=work, name="async reward", daemon=True).start()
        return self._loop

    def close(self) -> None:
        """The event loop ends, and with it the calls that still wait."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _check_blocked(self, waiting: asyncio.Future[list[Outcome]], silent_s: float) -> None:
        # Every run counts a heartbeat per poll. Without heartbeats, the function itself blocks the event loop.
        if (
            not waiting.done()
            and self._timeout_s is not None
            and silent_s > self._timeout_s + 4 * _ASYNC_POLL_INTERVAL_S
        ):
            raise TooManyHangingCallsError(
                f"the async function has blocked its event loop for {silent_s:.1f} s; it must await instead of blocking"
            )

    async def _run_all(
        self, all_kwargs: Sequence[dict[str, Any]], cancelled: threading.Event, ended: Future[None]
    ) -> list[Outcome]:
        """One task per call, and one timer for all: at 500 calls a timer for each takes as long as they do. `cancelled`
        is heard at the next poll; `ended` is done when the last call is."""
        tasks = [asyncio.ensure_future(_run_async_call(self._function, kwargs)) for kwargs in all_kwargs]
        # At least four polls per limit, so that one poll in a blocked event loop does not use up the limit.
        limit_s = float("inf") if self._timeout_s is None else self._timeout_s
        waiting, step, used_s = set(tasks), min(_ASYNC_POLL_INTERVAL_S, limit_s / 4), 0.0
        try:
            while waiting and used_s < limit_s and not cancelled.is_set():
                _, waiting = await asyncio.wait(waiting, timeout=step)
                self._heartbeats += 1
                used_s += step  # poll intervals, not wall time: a loop blocked by other calls must not cause a timeout
            return [self._given_up(task) if task in waiting else task.result() for task in tasks]
        finally:
            for task in waiting:
                task.cancel()
            asyncio.gather(*waiting, return_exceptions=True).add_done_callback(lambda _: ended.set_result(None))

    def _given_up(self, task: asyncio.Task[Outcome]) -> Outcome:
        ended: Future[None] = Future()
        task.add_done_callback(lambda _: ended.set_result(None))
        return Outcome(error=_timeout_error(self._timeout_s), still_runs=ended)


def _serve(loop: asyncio.AbstractEventLoop, executor: ThreadPoolExecutor) -> None:
    loop.run_forever()
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left, timeout=_ASYNC_POLL_INTERVAL_S))
    executor.shutdown(wait=False, cancel_futures=True)
    loop.close()


async def _run_async_call(function: Callable[..., Awaitable[Any]], kwargs: dict[str, Any]) -> Outcome:
    try:
        return Outcome(result=await function(**kwargs))
    except BaseException as error:  # also CancelledError, if the function itself raises it
        return Outcome(error=error)


def _timeout_error(timeout_s: float | None) -> RewardTimeoutError:
    return RewardTimeoutError(limit_text(timeout_s))


def limit_text(timeout_s: float | None) -> str:
    """What an error says about a call beyond its limit."""
    return f"no result after reward.timeout_s={timeout_s} seconds of running"


def check_signature(
    function: Callable[..., Any], name: str, kwargs: Mapping[str, Any], arguments: Sequence[str] = ARGUMENTS
) -> None:
    """ConfigError when the function cannot take the keywords it will be called with: `arguments`, and `kwargs`."""
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
