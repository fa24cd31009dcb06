"""Parking for engines that cannot park: unfinished answers are aborted, kept, and asked for again with their tokens."""

import asyncio
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.utils.errors import WorkerError
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Alternatives, Completion, GenerationRequest, RolloutEngine
from verl.workers.rollout.engine_stats import EngineStats

_FIRST_ID = 1 << 52  # of requests that continue others: above those of prompts, validations and agents
_ABORT_AGAIN_S = 0.1  # a request that reached the engine after an abort is not ended by it


@dataclass(eq=False)
class PartialAnswer:
    """One sample so far, in parts that were each sampled under one version."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)  # (version, tokens), versions ascending
    stop_reason: str | None = None  # None: unfinished
    alternatives: list[Alternatives] = field(default_factory=list)

    def add(self, part: Completion) -> None:
        """Append what the engine has sampled; an aborted part leaves the answer unfinished."""
        self.tokens += part.token_ids
        self.logprobs += part.logprobs
        self.alternatives += part.alternatives or []
        version = part.policy_version[1]
        if part.token_ids and self.segments and self.segments[-1][0] == version:
            self.segments[-1] = (version, self.segments[-1][1] + len(part.token_ids))
        elif part.token_ids:
            self.segments.append((version, len(part.token_ids)))
        self.stop_reason = None if part.stop_reason == "aborted" else part.stop_reason

    def completion(self, version: int) -> Completion:
        """The whole answer; `version` is that of one without tokens."""
        segments = self.segments or [(version, 0)]
        return Completion(
            self.tokens,
            self.logprobs,
            self.stop_reason or "aborted",
            (segments[0][0], segments[-1][0]),
            self.alternatives or None,
            tuple(segments) if len(segments) > 1 else (),
        )


@dataclass
class _Open:
    """A request whose `generate` has not returned."""

    request: GenerationRequest
    samples: list[PartialAnswer]
    inner_ids: set[int] = field(default_factory=set)  # of the engine's requests that run for it
    aborted: bool = False

    @property
    def done(self) -> bool:
        return self.aborted or all(sample.stop_reason for sample in self.samples)


class ReissuingEngine(RolloutEngine):
    """Samples by `inner`. `park` aborts what runs there; after `resume` each unfinished sample is a request of its own
    for its prompt and its tokens so far, under the weights that are published then, with random numbers of its own.

    Between `park` and `resume` the inner engine has nothing in flight, so that it may sleep, drop its cache and get
    weights; new requests wait. Requests with stop strings or penalties are refused: these look back at tokens that
    would be part of the prompt.
    """

    can_park = True

    def __init__(self, inner: RolloutEngine):
        self.inner = inner
        self._open: dict[int, _Open] = {}
        self._restored: dict[int, dict[str, Any]] = {}  # by request id, until `generate`
        self._running: set[asyncio.Future[Any]] = set()  # rounds at the inner engine
        self._going_on = asyncio.Event()
        self._going_on.set()
        self._ids = itertools.count(_FIRST_ID)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        params = request.sampling
        if params.stop or params.has_penalties:
            raise WorkerError(
                0, "generate",
                f"request {request.request_id} has stop={list(params.stop)} and penalties "
                f"({params.frequency_penalty:g}, {params.presence_penalty:g}, {params.repetition_penalty:g}): a "
                "parked answer goes on as a new prompt, in which the engine does not look for them; use "
                "stop_token_ids, or async_training.staleness_threshold=0",
            )  # fmt: skip
        opened = self._open[request.request_id] = _Open(request, self._samples_of(request))
        try:
            while not opened.done:
                if self._going_on.is_set():
                    await self._round(opened)
                else:
                    await self._going_on.wait()
        finally:
            del self._open[request.request_id]
        return [sample.completion(self.version) for sample in opened.samples]

    def _samples_of(self, request: GenerationRequest) -> list[PartialAnswer]:
        saved = self._restored.pop(request.request_id, None)
        if saved is None or saved["prompt"] != request.prompt_ids:  # a turn may begin otherwise than before
            return [PartialAnswer() for _ in range(request.sampling.n)]
        return [
            PartialAnswer([*s["tokens"]], [*s["logprobs"]], [(v, n) for v, n in s["segments"]], s["stop_reason"])
            for s in saved["samples"]
        ]

    async def _round(self, opened: _Open) -> None:
        """Sample until the request is complete or the engine is parked."""
        task = asyncio.ensure_future(self._ask(opened))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await task

    async def _ask(self, opened: _Open) -> None:
        unfinished = [sample for sample in opened.samples if sample.stop_reason is None]
        if not any(sample.tokens or sample.stop_reason for sample in opened.samples):
            asked = [opened.request]
        else:
            asked = [self._rest(opened.request, opened.samples.index(s), s) for s in unfinished]
        opened.inner_ids = {request.request_id for request in asked}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.inner.generate(request)) for request in asked]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled because of it
        parts = [part for task in tasks for part in task.result()]
        for sample, part in zip(unfinished, parts, strict=True):
            sample.add(part)

    def _rest(self, request: GenerationRequest, index: int, sample: PartialAnswer) -> GenerationRequest:
        """What is left of one sample, as a request."""
        params, count = request.sampling, len(sample.tokens)
        rest = replace(params, n=1, max_tokens=params.max_tokens - count, min_tokens=max(params.min_tokens - count, 0))
        stream = derive_seed(request.stream_id, index, count)
        return GenerationRequest(
            next(self._ids), request.prompt_ids + sample.tokens, rest, request.conversation, random_stream=stream
        )

    async def park(self) -> None:
        self._going_on.clear()
        while running := tuple(self._running):
            await self.inner.abort()
            await asyncio.wait(running, timeout=_ABORT_AGAIN_S)

    async def resume(self) -> None:
        self._going_on.set()

    def parked(self) -> list[dict[str, Any]]:
        return [
            {
                "request_id": number,
                "prompt": opened.request.prompt_ids,
                "samples": [
                    {name: [*getattr(sample, name)] for name in ("tokens", "logprobs", "segments")}
                    | {"stop_reason": sample.stop_reason}
                    for sample in opened.samples
                ],
            }
            for number, opened in self._open.items()
        ]

    def restore(self, parked: Sequence[dict[str, Any]]) -> None:
        self._restored = {saved["request_id"]: saved for saved in parked}

    async def abort(self, request_id: int | None = None) -> None:
        for number, opened in tuple(self._open.items()):
            if request_id in (None, number):
                opened.aborted = True
                for inner_id in tuple(opened.inner_ids):
                    await self.inner.abort(inner_id)

    async def update_weights(self, weights: Any, version: int) -> None:
        await self.inner.update_weights(weights, version)

    async def sleep(self) -> None:
        await self.inner.sleep()

    async def sleep_until_update(self) -> None:
        await self.inner.sleep_until_update()

    async def wake(self) -> None:
        await self.inner.wake()

    def close(self) -> None:
        self.inner.close()

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self.inner.compute_logprobs(sequences)

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

    async def stats(self) -> list[EngineStats]:
        return await self.inner.stats()
