"""The rollout engine on the driver that distributes requests over the ranks."""

import asyncio
import contextlib
from concurrent.futures import Future
from typing import Any

from verl.runtime.group import WorkerGroup
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.tournament_tree import LeastLoaded

ROLE = "rollout"  # the attribute of `RankWorkers` that is called


class MultiRankRolloutEngine(RolloutEngine):
    """Sends requests that arrive together to the ranks with the fewest open samples, which decode them together.

    Samples do not depend on the rank: their random numbers are a function of seed, request and position.
    """

    def __init__(self, group: WorkerGroup):
        self.group = group
        self._version = -1
        self._open_samples = LeastLoaded(group.layout.world_size)
        self._waiting: list[tuple[GenerationRequest, asyncio.Future[tuple[int, Future]]]] = []

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send)  # after the tasks that are ready have added their requests
        dispatched: asyncio.Future[tuple[int, Future]] = loop.create_future()
        self._waiting.append((request, dispatched))
        rank, answer = await dispatched
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerError):
                self.group.post(rank, f"{ROLE}.abort", [(request.request_id,)])
            raise
        finally:
            self._open_samples[rank] -= request.sampling.n

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        requests_by_rank: list[list[tuple[GenerationRequest, asyncio.Future]]] = [
            [] for _ in range(self.group.layout.world_size)
        ]
        for request, dispatched in waiting:
            if not dispatched.cancelled():
                rank = self._open_samples.least
                self._open_samples[rank] += request.sampling.n
                requests_by_rank[rank].append((request, dispatched))
        for rank, requests in enumerate(requests_by_rank):
            if not requests:
                continue
            try:
                answers = self.group.post(rank, f"{ROLE}.generate", [(request,) for request, _ in requests])
            except Exception as error:
                for _, dispatched in requests:
                    dispatched.set_exception(error)
                continue
            for (_, dispatched), answer in zip(requests, answers, strict=True):
                dispatched.set_result((rank, answer))

    async def update_weights(self, weights: Any, version: int) -> None:
        """Make every rank gather the weights of its own engine; `weights` is None."""
        await self.publish(version)

    async def publish(self, version: int) -> int:
        """Make every rank sample from its engine's weights as policy `version`; bytes copied on all ranks."""
        answers = await self._on_all_ranks("publish", version)
        self._version = min(answer.version for answer in answers)
        return sum(answer.bytes_copied for answer in answers)

    async def sleep(self) -> None:
        await self._on_all_ranks("sleep")

    async def wake(self) -> None:
        await self._on_all_ranks("wake")

    async def park(self) -> None:
        await self._on_all_ranks("park")

    async def resume(self) -> None:
        await self._on_all_ranks("resume")

    async def in_flight(self) -> list[GenerationRequest]:
        return [request for requests in await self._on_all_ranks("in_flight") for request in requests]

    async def abort(self, request_id: int | None = None) -> None:
        await self._on_all_ranks("abort", request_id)

    async def _on_all_ranks(self, method: str, *args: Any) -> list[Any]:
        """The results of all ranks; the event loop goes on meanwhile."""
        return await asyncio.to_thread(self.group.broadcast, f"{ROLE}.{method}", *args)

    async def stats(self) -> list[EngineStats]:
        return await self._on_all_ranks("stats")

    @property
    def version(self) -> int:
        return self._version
