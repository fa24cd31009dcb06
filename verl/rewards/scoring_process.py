"""The two kinds of a scoring child: a process of this machine, and an actor of Ray."""

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from socket import socketpair
from struct import pack, unpack
from typing import Any

from verl.rewards.calls import ScorerSource
from verl.rewards.scoring_child import ScoringChild
from verl.rewards.scoring_pool import Reply, Request
from verl.runtime.child import Child, ChildLostError, finds_verl
from verl.utils.errors import ConfigError

START_LIMIT_S = 300.0  # of a process that loads the function, and what that imports


class LocalChild:
    """A process of this machine, which `start` starts. Frames are those of multiprocessing.connection."""

    has_beat, is_async = True, False

    def __init__(self, child: Child, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._child, self._reader, self._writer = child, reader, writer
        self.pid: int | None = child.process.pid

    @classmethod
    async def start(cls, source: ScorerSource) -> "LocalChild":
        """ConfigError where it cannot load the function."""
        ours, theirs = socketpair()
        command = [sys.executable, "-m", "verl.rewards.scoring_child"]
        # One order of sets in every process, so that an answer gets the same score in that which replaces another.
        environment = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **os.environ}
        process = Child(command, finds_verl(environment), theirs)
        child = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            child._write(source.search_path)
            child._write(source)
            started = json.loads(await asyncio.wait_for(child._frame(), START_LIMIT_S))
            if "error" in started:
                raise ConfigError(f"in a process of its own: {started['error']}")
        except (ChildLostError, TimeoutError) as error:
            child.close()
            how = str(error) or f"it has not started in {START_LIMIT_S:.0f} s"
            raise ConfigError(f"the process of reward function {source.name} ({source.path}): {how}") from error
        except BaseException:
            child.close()
            raise
        child.is_async = started["is_async"]
        return child

    def send(self, requests: list[Request]) -> None:
        if requests:
            self._write(requests)

    def _write(self, message: Any) -> None:
        frame = bytes(ForkingPickler.dumps(message))
        self._writer.write(pack("!i", len(frame)) + frame)

    async def receive(self) -> list[Reply]:
        return list(json.loads(await self._frame()))

    async def _frame(self) -> bytes:
        try:
            (size,) = unpack("!i", await self._reader.readexactly(4))
            return await self._reader.readexactly(size)
        except (EOFError, OSError):
            how = await asyncio.to_thread(self._child.how_it_ended)
            raise ChildLostError(f"it ended with {how or 'no answer'} during the call") from None

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._child.end()
        self._writer.close()


class RayChild:
    """An actor of Ray on any node, which takes no core from the ranks. It makes one call at a time."""

    has_beat, is_async = False, False

    def __init__(self, actor: Any):
        self.pid: int | None = None  # on another machine, or not known
        self._actor, self._thread = actor, ThreadPoolExecutor(1)
        self._replies: asyncio.Queue[Reply | ChildLostError] = asyncio.Queue()

    @classmethod
    async def start(cls, source: ScorerSource) -> "RayChild":
        """VerlError where it cannot load the function."""
        from verl.runtime.ray_objects import FreeActor

        return cls(await asyncio.to_thread(FreeActor, ScoringChild, source))

    def send(self, requests: list[Request]) -> None:
        loop = asyncio.get_running_loop()
        for number, row in requests:
            if row is not None:
                loop.run_in_executor(self._thread, self._ask, loop, number, row)

    def _ask(self, loop: asyncio.AbstractEventLoop, number: int, row: bytes) -> None:
        answer: Reply | ChildLostError
        try:
            answer = (number, json.loads(self._actor.call("call", row, limit_s=None)))
        except EOFError as error:
            answer = ChildLostError(f"its actor of Ray ended during the call: {error}")
        loop.call_soon_threadsafe(self._replies.put_nowait, answer)

    async def receive(self) -> list[Reply]:
        answer = await self._replies.get()
        if isinstance(answer, ChildLostError):
            raise answer
        return [answer]

    def kill(self) -> None:
        self._actor.end()

    def close(self) -> None:
        self.kill()
        self._thread.shutdown(wait=False)
