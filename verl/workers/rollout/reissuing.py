"""Parking for engines that cannot park by themselves: unfinished answers are aborted, kept, and asked for again with
their tokens, or wait in the engine with their KV cache."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from verl.utils.errors import WorkerError
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine
from verl.workers.rollout.parking import samples_in_flight
from verl.workers.rollout.partial_answer import PartialAnswer
from verl.workers.rollout.wrapped import WrappedEngine

_FIRST_ID = 1 << 52  # of requests that continue others: above those of prompts, validations and agents
_ABORT_AGAIN_S = 0.1  # a request that reached the engine after an abort is not ended by it


@dataclass
class _Open:
    """A request whose `generate` has not returned."""

    request: GenerationRequest
    samples: list[PartialAnswer]
    inner: dict[int, list[PartialAnswer]] = field(default_factory=dict)  # samples of the engine's requests that run
    aborted: bool = False

    @property
    def done(self) -> bool:
        return self.aborted or all(sample.stop_reason for sample in self.samples)


class ReissuingEngine(WrappedEngine):
    """Samples by `inner`. `park` aborts what runs there; after `resume` each unfinished sample is a request of its own
    for its prompt and its tokens so far, under the weights that are published then, with random numbers of its own.

    Between `park` and `resume` the inner engine has nothing in flight, so that it may sleep, drop its cache and get
    weights; new requests wait. Requests with stop strings or penalties are refused: these look back at tokens that
    would be part of the prompt.

    With `keeps_cache` the inner engine parks: nothing is aborted, what runs there goes on with its KV cache, and it
    does not sleep while there is such a request. Only what `restore` brings is asked for with its tokens.
    """

    can_park = True

    def __init__(self, inner: RolloutEngine, keeps_cache: bool = False):
        super().__init__(inner)
        self.keeps_cache = keeps_cache
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
        samples = [PartialAnswer() for _ in range(request.sampling.n)]
        for number, s in samples_in_flight(saved).items():
            segments = [(version, count) for version, count in s["segments"]]
            samples[number] = PartialAnswer([*s["tokens"]], [*s["logprobs"]], segments, s["stop_reason"])
        return samples

    async def _round(self, opened: _Open) -> None:
        """Sample until the request is complete or the engine is parked."""
        task = asyncio.ensure_future(self._ask(opened))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await task

    async def _ask(self, opened: _Open) -> None:
        unfinished = [sample for sample in opened.samples if sample.stop_reason is None]
        if not any(sample.tokens or sample.stop_reason for sample in opened.samples):
            asked = [(opened.request, opened.samples)]
        else:
            asked = [(self._rest(opened.request, opened.samples.index(s), s), [s]) for s in unfinished]
        opened.inner = {request.request_id: samples for request, samples in asked}
        try:
            async with asyncio.TaskGroup() as group:
                for request, samples in asked:
                    group.create_task(self._part(opened, request, samples))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled because of it

    async def _part(self, opened: _Open, request: GenerationRequest, samples: list[PartialAnswer]) -> None:
        """Add what the engine answers, before anything else can ask what is in flight."""
        parts = await self.inner.generate(request)
        del opened.inner[request.request_id]
        for sample, part in zip(samples, parts, strict=True):
            sample.add(part)

    def _rest(self, request: GenerationRequest, index: int, sample: PartialAnswer) -> GenerationRequest:
        """The rest of one sample, as a request."""
        params, count = request.sampling, len(sample.tokens)
        rest = replace(params, n=1, max_tokens=params.max_tokens - count, min_tokens=max(params.min_tokens - count, 0))
        stream = derive_seed(request.stream_id, index, count)
        return GenerationRequest(
            next(self._ids), request.prompt_ids + sample.tokens, rest, request.conversation, random_stream=stream
        )

    async def park(self) -> None:
        self._going_on.clear()
        if self.keeps_cache:
            return await self.inner.park()
        while running := tuple(self._running):
            await self.inner.abort()
            await asyncio.wait(running, timeout=_ABORT_AGAIN_S)

    async def resume(self) -> None:
        if self.keeps_cache:
            await self.inner.resume()
        self._going_on.set()

    def parked(self) -> list[dict[str, Any]]:
        """The requests parked here, without those in the engine, which `in_flight` asks."""
        return self._saved({})

    async def in_flight(self) -> list[dict[str, Any]]:
        running = await self.inner.in_flight() if self.keeps_cache else []
        return self._saved({saved["request_id"]: samples_in_flight(saved) for saved in running})

    def _saved(self, running: dict[int, dict[int, dict[str, Any]]]) -> list[dict[str, Any]]:
        """All that is in flight as JSON values; `running` are the samples of the inner requests, by id."""
        out = []
        for number, opened in self._open.items():
            more = {
                id(sample): running.get(inner_id, {}).get(place)
                for inner_id, samples in opened.inner.items()
                for place, sample in enumerate(samples)
            }
            samples = [sample.saved(more.get(id(sample))) for sample in opened.samples]
            out.append({"request_id": number, "prompt": opened.request.prompt_ids, "samples": samples})
        return out

    @property
    def _holds(self) -> bool:
        """Whether requests wait in the inner engine with their KV cache."""
        return self.keeps_cache and not self._going_on.is_set() and any(o.inner for o in self._open.values())

    def restore(self, parked: Sequence[dict[str, Any]]) -> None:
        self._restored = {saved["request_id"]: saved for saved in parked}

    async def abort(self, request_id: int | None = None) -> None:
        for number, opened in tuple(self._open.items()):
            if request_id in (None, number):
                opened.aborted = True
                for inner_id in tuple(opened.inner):
                    await self.inner.abort(inner_id)

    async def sleep(self) -> None:
        if not self._holds:
            await super().sleep()

    async def sleep_until_update(self) -> None:
        if not self._holds:
            await super().sleep_until_update()
