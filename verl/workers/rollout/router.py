"""Routes each request to the least loaded replica, and all turns of a conversation to the same replica."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Sequence

from torch import Tensor

from verl.workers.rollout.base import Completion, CopyingEngine, GenerationRequest, StaleWeightsError, TokenCallback
from verl.workers.rollout.engine_stats import EngineStats

_MAX_CONVERSATIONS = 100_000  # conversations whose replica is remembered


class Router(CopyingEngine):
    """Balances the tokens (prompt + max_tokens) of running requests; all replicas hold one version of the weights."""

    def __init__(self, engines: Sequence[CopyingEngine]):
        self.engines = list(engines)
        self.bucket_bytes, self.dtype = engines[0].bucket_bytes, engines[0].dtype
        self.load: Counter[int] = Counter()
        self.replica_of_conversation: OrderedDict[int, int] = OrderedDict()
        self.replica_of_request: dict[int, int] = {}

    @property
    def replicas(self) -> Sequence[CopyingEngine]:
        return self.engines

    @property
    def response_formats(self) -> Collection[str]:  # type: ignore[override]
        return self.engines[0].response_formats

    @property
    def receivers(self) -> Sequence[CopyingEngine]:
        return self.engines if self.engines[0].out_of_process else [self]

    @property
    def version(self) -> int:
        versions = {engine.version for engine in self.engines}
        if len(versions) > 1:
            raise StaleWeightsError(f"replicas hold different versions: {[engine.version for engine in self.engines]}")
        return versions.pop()

    def pick_replica(self, conversation: int) -> int:
        """The replica of an earlier turn of this conversation, else the least loaded."""
        if conversation not in self.replica_of_conversation:
            self.replica_of_conversation[conversation] = min(range(len(self.engines)), key=lambda i: (self.load[i], i))
            if len(self.replica_of_conversation) > _MAX_CONVERSATIONS:
                self.replica_of_conversation.popitem(last=False)
        return self.replica_of_conversation[conversation]

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return await self._send(request, lambda engine: engine.generate(request))

    async def stream(self, request: GenerationRequest, on_tokens: TokenCallback) -> list[Completion]:
        return await self._send(request, lambda engine: engine.stream(request, on_tokens))

    async def _send(
        self, request: GenerationRequest, call: Callable[[CopyingEngine], Awaitable[list[Completion]]]
    ) -> list[Completion]:
        index = self.pick_replica(request.request_id if request.conversation is None else request.conversation)
        self.replica_of_request[request.request_id] = index
        cost = request.sampling.n * (len(request.prompt_ids) + request.sampling.max_tokens)
        self.load[index] += cost
        try:
            return await call(self.engines[index])
        finally:
            self.load[index] -= cost
            self.replica_of_request.pop(request.request_id, None)

    async def abort(self, request_id: int | None = None) -> None:
        if request_id is None:
            await asyncio.gather(*(engine.abort() for engine in self.engines))
        elif request_id in self.replica_of_request:
            await self.engines[self.replica_of_request[request_id]].abort(request_id)

    async def begin_update(self) -> None:
        await asyncio.gather(*(engine.begin_update() for engine in self.engines))

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
        arrived = await asyncio.gather(*(engine.load_bucket(bucket) for engine in self.engines))
        return [replica for engine in arrived for replica in engine]

    async def finish_update(self, version: int) -> None:
        await asyncio.gather(*(engine.finish_update(version) for engine in self.engines))

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self.engines[0].compute_logprobs(sequences)

    async def sleep(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self.engines))

    async def sleep_until_update(self) -> None:
        await asyncio.gather(*(engine.sleep_until_update() for engine in self.engines))

    async def wake(self) -> None:
        await asyncio.gather(*(engine.wake() for engine in self.engines))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    async def stats(self) -> list[EngineStats]:
        by_engine = await asyncio.gather(*(engine.stats() for engine in self.engines))
        return [replica for engine in by_engine for replica in engine]
