"""The ranks' rollout, as the driver sees it: one engine that gives every rank its share of the requests."""

import asyncio
import contextlib
from concurrent.futures import Future
from typing import Any

from verl.runtime.processes import ProcessGroup
from verl.utils.errors import WorkerError
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine

ROLE = "rollout"  # the attribute of `Roles` that answers


class RanksEngine(RolloutEngine):
    """Requests that arrive together go to the ranks with the fewest open samples and are decoded together there.

    Which rank answers changes nothing: a sample's random numbers follow from seed, request and position.
    """

    def __init__(self, group: ProcessGroup):
        self.group = group
        self._version = -1
        self._open = [0] * group.layout.world_size  # samples
        self._arrived: list[tuple[GenerationRequest, asyncio.Future[tuple[int, Future]]]] = []

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        loop = asyncio.get_running_loop()
        if not self._arrived:
            loop.call_soon(self._send)  # after all that are ready to arrive
        sent: asyncio.Future[tuple[int, Future]] = loop.create_future()
        self._arrived.append((request, sent))
        rank, answer = await sent
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            with contextlib.suppress(WorkerError):
                self.group.post(rank, f"{ROLE}.abort", [(request.request_id,)])
            raise
        finally:
            self._open[rank] -= request.sampling.n

    def _send(self) -> None:
        arrived, self._arrived = self._arrived, []
        shares: list[list[tuple[GenerationRequest, asyncio.Future]]] = [[] for _ in self._open]
        for request, sent in arrived:
            if not sent.cancelled():
                rank = self._open.index(min(self._open))
                self._open[rank] += request.sampling.n
                shares[rank].append((request, sent))
        for rank, share in enumerate(shares):
            if not share:
                continue
            try:
                answers = self.group.post(rank, f"{ROLE}.generate", [(request,) for request, _ in share])
            except Exception as error:
                for _, sent in share:
                    sent.set_exception(error)
                continue
            for (_, sent), answer in zip(share, answers, strict=True):
                sent.set_result((rank, answer))

    async def update_weights(self, weights: Any, version: int) -> None:
        """Every rank gathers the weights that its engine trains; `weights` is None."""
        await self.publish(version)

    async def publish(self, version: int) -> int:
        """Make every rank sample from its engine's weights as `version`; bytes that all of them took."""
        answers = self.group.broadcast(f"{ROLE}.publish", version)
        self._version = min(answer[0] for answer in answers)
        return sum(answer[1] for answer in answers)

    async def sleep(self) -> None:
        self.group.broadcast(f"{ROLE}.sleep")

    async def wake(self) -> None:
        self.group.broadcast(f"{ROLE}.wake")

    async def abort(self, request_id: int | None = None) -> None:
        self.group.broadcast(f"{ROLE}.abort", request_id)

    def stats(self) -> dict[str, float]:
        """Counts and seconds summed over the ranks; shares (occupancy, cache use) averaged."""
        every = self.group.broadcast(f"{ROLE}.stats")
        shares = {"occupancy", "cache_use"}
        return {name: sum(rank[name] for rank in every) / (len(every) if name in shares else 1) for name in every[0]}

    @property
    def version(self) -> int:
        return self._version
