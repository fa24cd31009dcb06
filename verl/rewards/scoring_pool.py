"""Calls of a reward function in processes of its own: what it does to a process, the trainer's does not feel.

All pools of a program run in one event loop, which has a thread of its own. A child takes calls in the order in which
it got them, so the driver knows which of them run: the first ones, as many as the child has threads.
"""

import asyncio
import copyreg
import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

from verl.rewards.call_limits import CallLimits
from verl.rewards.calls import (
    BlockedLoopError,
    Outcome,
    ProcessKilledError,
    ProcessLostError,
    RemoteCallError,
    RewardTimeoutError,
    ScorerSource,
    limit_text,
)
from verl.rewards.worker_slots import OfProcess
from verl.runtime.child import ChildLostError
from verl.runtime.event_loop import EventLoopThread

GRACE_S = 4.0  # beyond its limit, for an async call to end when it is cancelled
SILENT_S = 1.0  # beyond the limit of a call, in which a child may give no sign of life
Request = tuple[int, bytes | None]  # number and row of a call; None: nobody waits for it any more
Reply = tuple[int, dict[str, Any] | None]  # number 0: a sign of life; None: the call was not made


class PoolChild(Protocol):
    """A process that has loaded the function. Its methods are called in the loop of the pools."""

    is_async: bool
    has_beat: bool  # it gives signs of life
    pid: int | None

    def send(self, requests: list[Request]) -> None:
        """Ask it; it takes requests in this order."""

    async def receive(self) -> list[Reply]:
        """The answers since the last call; ChildLostError when it has ended."""

    def kill(self) -> None:
        """End it, and what it has started, at once: `receive` says so."""

    def close(self) -> None:
        """Give back what belongs to it."""


class StartChild(Protocol):
    async def __call__(self, source: ScorerSource) -> PoolChild:
        """A child that has loaded the function; VerlError where it cannot."""


@dataclass
class _Group:
    """Rows of one `call`, whose waiter is woken once for all of them."""

    outcomes: list[Outcome | None]
    left: int
    done: "asyncio.Future[None]"

    def note(self, index: int, outcome: Outcome) -> None:
        self.outcomes[index] = outcome
        self.left -= 1
        if self.left == 0 and not self.done.done():
            self.done.set_result(None)


@dataclass(eq=False)
class _Call:
    number: int
    row: bytes
    group: _Group
    index: int
    limits: CallLimits | None

    def end(self, outcome: Outcome) -> None:
        if self.limits is not None:
            self.limits.leave()
        self.group.note(self.index, outcome)


@dataclass(eq=False)
class _Held:
    """A child, and the calls that it has."""

    child: PoolChild
    threads: int
    calls: dict[int, _Call] = field(default_factory=dict)
    used_s: dict[int, float] = field(default_factory=dict)  # by the number of a call
    late: set[_Call] = field(default_factory=set)
    heard: bool = True
    silent_s: float = 0.0
    is_silent: bool = False

    async def receive(self) -> list[Reply]:
        """The answers since the last call; a sign of life, even where there are none."""
        replies = await self.child.receive()
        self.heard = True
        return replies

    def is_over_limit(self, beat_s: float, limit_s: float) -> bool:
        """Whether, after another `beat_s`, a call is beyond its limit or the child is silent for as long.

        Only intervals in which it gave a sign of life count for its calls: neither a process that is stopped nor one
        call that holds the interpreter makes the others late.
        """
        grace_s = GRACE_S if self.child.is_async else 0.0
        heard, self.heard = self.heard or not self.child.has_beat, False
        self.silent_s = 0.0 if heard or not self.calls else self.silent_s + beat_s
        if heard:
            self.used_s = {call.number: self.used_s.get(call.number, 0.0) + beat_s for call in self.running}
        self.late = {call for call in self.running if self.used_s.get(call.number, 0.0) >= limit_s + grace_s}
        self.is_silent = self.silent_s > limit_s + max(grace_s, SILENT_S)
        return bool(self.late) or self.is_silent

    @property
    def running(self) -> list[_Call]:
        every = self.calls.values()
        return list(every if self.child.is_async else itertools.islice(every, self.threads))


class ScoringPool:
    """Calls of the function of `source` in at most `size` children, which start on first use.

    Several children make one call at a time each, a single one as many as it has threads. A child that ends, is silent
    as long as a limit, or has a call beyond its limit is replaced. A call that must have caused it is an error; where
    several calls ran, they are asked again one by one, so that the one that did it is known. Children end with `close`,
    or with the last reference to the pool.
    """

    def __init__(self, source: ScorerSource, start: StartChild, size: int = 1, limits: CallLimits | None = None):
        self._children = _Children(source, start, size, limits)
        self._end = weakref.finalize(self, _end_later, self._children)
        self._end.atexit = False  # they end with this process
        _pools.add(self)

    @property
    def is_async(self) -> bool:
        """Whether the function is async; known when the first child has started."""
        return self._children.is_async

    @property
    def pids(self) -> list[int]:
        """Process ids of its children on this machine."""
        return [held.child.pid for held in self._children.held if held.child.pid is not None]

    def check(self, start: StartChild) -> None:
        """Start a child by `start` and keep it, where that is the pool's way; ConfigError where it cannot start."""
        _loop().run(self._children.check(start))

    async def call(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Outcomes of one call per dict of keyword arguments, in that order."""
        return await asyncio.wrap_future(_loop().start(self._children.call(rows)))

    def close(self) -> None:
        """End all children; a call that runs fails, and a later one starts another."""
        _loop().run(self._children.close())


class _Children:
    """The children of a pool, and the calls that they have and that wait for them; in the loop of the pools."""

    def __init__(self, source: ScorerSource, start: StartChild, size: int, limits: CallLimits | None):
        self.source, self._start, self._size, self._limits = source, start, size, limits
        self.is_async = False
        self.held: set[_Held] = set()
        self._numbers = itertools.count(1)
        self._waiting: deque[_Call] = deque()
        self._suspects: deque[_Call] = deque()
        self._serving: set[asyncio.Task[None]] = set()

    async def check(self, start: StartChild) -> None:
        child = await start(self.source)
        self.is_async = child.is_async
        if start == self._start:
            self._begin(child)
        else:
            child.close()

    async def call(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        if self._limits is None:
            return await self._ask(rows)
        return [outcome for (outcome,) in await asyncio.gather(*(self._ask_limited(row) for row in rows))]

    async def _ask_limited(self, row: dict[str, Any]) -> list[Outcome]:
        assert self._limits is not None
        await self._limits.enter()
        return await self._ask([row])

    async def _ask(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        group = _Group([None] * len(rows), len(rows), asyncio.get_running_loop().create_future())
        for index, row in enumerate(rows):
            try:
                sent, refused = bytes(_RowPickler.dumps(row)), None
            except Exception as error:  # of an object that an agent loop added
                sent, refused = b"", f"the row cannot travel to another process: {error}"
            call = _Call(next(self._numbers), sent, group, index, self._limits)
            if refused is None:
                self._waiting.append(call)
            else:
                call.end(Outcome(error=RemoteCallError(refused, is_final=True)))
        self._dispatch()
        try:
            if rows:
                await group.done
        finally:
            if group.left:
                self._drop(group)
        return [outcome for outcome in group.outcomes if outcome is not None]

    def _drop(self, group: _Group) -> None:
        """Nobody waits for `group` any more: what has not begun does not, and what runs ends by itself."""
        for queue in (self._waiting, self._suspects):
            for call in [call for call in queue if call.group is group]:
                queue.remove(call)
                call.end(Outcome())
        for held in self.held:
            held.child.send([(number, None) for number, call in held.calls.items() if call.group is group])

    def _dispatch(self) -> None:
        """Give the calls that wait to children; start others where all are busy."""
        for held in self.held:
            room = len(self._waiting) if self._size == 1 else 1 - len(held.calls)
            source = self._waiting
            if self._suspects:
                source, room = self._suspects, 1 - len(held.calls)
            taken = [source.popleft() for _ in range(min(room, len(source)))]
            held.calls.update((call.number, call) for call in taken)
            if taken:
                held.child.send([(call.number, call.row) for call in taken])
        starting = len(self._serving) - len(self.held)
        wanted = len(self._waiting) + len(self._suspects) - starting
        for _ in range(min(self._size - len(self._serving), wanted)):
            self._begin()

    def _begin(self, child: PoolChild | None = None) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(child))
        self._serving.add(task)

    async def _serve(self, child: PoolChild | None) -> None:
        """Start a child, unless it is given, and hear its answers until it ends."""
        watch: asyncio.Task[None] | None = None
        held: _Held | None = None
        try:
            child = child or await self._start(self.source)
            self.is_async = child.is_async
            held = _Held(child, self.source.num_threads if self._size == 1 else 1)
            self.held.add(held)
            watch = asyncio.get_running_loop().create_task(self._watch(held))
            self._dispatch()
            while True:
                for number, reply in await held.receive():
                    if (call := held.calls.pop(number, None)) is not None:
                        call.end(_outcome(reply, self.source.timeout_s))
                self._dispatch()
        except ChildLostError as error:
            assert held is not None
            self.held.discard(held)
            self._ask_again(held, error)
        except Exception as error:  # it cannot start
            self._end_all([*self._suspects, *self._waiting], error)
        finally:
            self._serving.discard(asyncio.current_task())
            if watch is not None:
                watch.cancel()
            if held is not None:
                self.held.discard(held)
                self._end_all(held.calls.values(), ProcessLostError("it was ended with its reward"))
            if child is not None:
                child.close()
        self._dispatch()

    def _end_all(self, calls: Any, error: BaseException) -> None:
        for call in [*calls]:
            for queue in (self._waiting, self._suspects):
                if call in queue:
                    queue.remove(call)
            call.end(Outcome(error=error))

    def _ask_again(self, held: _Held, error: ChildLostError) -> None:
        """Errors of the calls that ended the child; the others wait for the next one."""
        running, late = held.running, held.late & set(held.calls.values())
        killed = ProcessKilledError(limit_text(self.source.timeout_s))
        calls = list(held.calls.values())
        held.calls.clear()
        if held.is_silent and held.child.is_async:
            text = f"the async function has blocked its event loop for {held.silent_s:.1f} s; it must await instead of"
            self._end_all(calls, BlockedLoopError(f"{text} blocking"))
            return
        guilty = late if held.late or len(running) > 1 else set(running)
        for call in reversed(calls):
            if call.group.done.cancelled():
                call.end(Outcome())
            elif call in guilty:
                call.end(Outcome(error=killed if late or held.is_silent else ProcessLostError(str(error))))
            elif call in running and not held.late:
                self._suspects.appendleft(call)
            else:
                self._waiting.appendleft(call)

    async def _watch(self, held: _Held) -> None:
        """Kill the child when a call is beyond its limit, or when it is silent for as long."""
        if (limit_s := self.source.timeout_s) is None:
            return
        while True:
            await asyncio.sleep(self.source.beat_s)
            if held.is_over_limit(self.source.beat_s, limit_s):
                held.child.kill()
                return

    async def close(self) -> None:
        self._end_all([*self._suspects, *self._waiting], ProcessLostError("it was ended with its reward"))
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


def _outcome(reply: dict[str, Any] | None, timeout_s: float | None) -> Outcome:
    if reply is None:
        return Outcome()
    if "late" in reply:
        return Outcome(error=RewardTimeoutError(limit_text(timeout_s)))
    if "error" in reply:
        return Outcome(error=RemoteCallError(reply["error"], reply["traceback"], reply["is_final"]))
    return Outcome(reply["result"])


class _RowPickler(ForkingPickler):
    """Tensors travel by value: memory that they shared would have to outlive the call."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.dispatch_table = copyreg.dispatch_table


def _end_later(children: _Children) -> None:
    _loop().start(children.close())


_loop = OfProcess(lambda: EventLoopThread("rewards"))
_pools: "weakref.WeakSet[ScoringPool]" = weakref.WeakSet()


def scoring_processes() -> list[int]:
    """Process ids of the children of all rewards of this process."""
    return [pid for pool in list(_pools) for pid in pool.pids]


def end_scoring_processes() -> None:
    """End those of all rewards of this process, whose runs are over."""
    for pool in list(_pools):
        pool.close()
