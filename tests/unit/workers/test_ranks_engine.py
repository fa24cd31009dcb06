"""The rollout engine over ranks."""

import asyncio
import threading
from collections.abc import Awaitable

from verl.runtime.inline import InlineGroup
from verl.workers.rank_rollout import RankPublish
from verl.workers.ranks_engine import MultiRankRolloutEngine


class SlowRollout:
    """Blocks in every call until the event loop of the caller has gone on."""

    def __init__(self) -> None:
        self.loop_went_on = threading.Event()

    def wait(self) -> None:
        assert self.loop_went_on.wait(timeout=60), "the event loop stood still during the call"
        self.loop_went_on.clear()

    def wake(self) -> None:
        self.wait()

    def sleep(self) -> None:
        self.wait()

    def abort(self, request_id: int | None) -> None:
        self.wait()

    def publish(self, version: int) -> RankPublish:
        self.wait()
        return RankPublish(version, 10)


class Worker:
    def __init__(self) -> None:
        self.rollout = SlowRollout()


def test_calls_on_all_ranks_do_not_block_the_event_loop():
    worker = Worker()
    engine = MultiRankRolloutEngine(InlineGroup(worker))

    async def beside(call: Awaitable[object]) -> None:
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        worker.rollout.loop_went_on.set()
        await task

    async def every_call() -> None:
        for call in (engine.wake(), engine.publish(3), engine.abort(), engine.sleep()):
            await beside(call)

    asyncio.run(every_call())
    assert engine.version == 3
