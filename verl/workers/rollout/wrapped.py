"""A rollout engine around another one."""

from collections.abc import Collection, Sequence
from typing import Any

from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine, TokenStream
from verl.workers.rollout.engine_stats import EngineStats


class WrappedEngine(RolloutEngine):
    """Does all that `inner` does; a derived class changes some of it. Parking is the derived class's own business."""

    def __init__(self, inner: RolloutEngine):
        self.inner = inner

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return await self.inner.generate(request)

    async def update_weights(self, weights: Any, version: int) -> None:
        await self.inner.update_weights(weights, version)

    async def sleep(self) -> None:
        await self.inner.sleep()

    async def sleep_until_update(self) -> None:
        await self.inner.sleep_until_update()

    async def wake(self) -> None:
        await self.inner.wake()

    async def abort(self, request_id: int | None = None) -> None:
        await self.inner.abort(request_id)

    def close(self) -> None:
        self.inner.close()

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self.inner.compute_logprobs(sequences)

    async def stats(self) -> list[EngineStats]:
        return await self.inner.stats()

    @property
    def token_streams(self) -> dict[int, TokenStream]:
        return self.inner.token_streams

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def copied_bytes(self) -> int:
        return self.inner.copied_bytes

    @property
    def response_formats(self) -> Collection[str]:  # type: ignore[override]
        return self.inner.response_formats

    @property
    def lost(self) -> str | None:  # type: ignore[override]
        return self.inner.lost

    @property
    def lost_replicas(self) -> Sequence[int]:  # type: ignore[override]
        return self.inner.lost_replicas

    @property
    def metrics_addresses(self) -> Sequence[str]:  # type: ignore[override]
        return self.inner.metrics_addresses
