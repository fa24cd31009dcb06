"""Parking: unfinished answers outlive a publish and a process, because a request may carry what was sampled of it."""

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from verl.utils.errors import WorkerError
from verl.utils.seeds import derive_seed
from verl.workers.rollout.base import Completion, GenerationRequest, RolloutEngine
from verl.workers.rollout.partial_answer import joined
from verl.workers.rollout.wrapped import WrappedEngine

NO, ASK_AGAIN, PAUSE = "no", "ask_again", "pause"
_FIRST_ID = 1 << 52  # of requests for the rest of a sample: above those of prompts, validations and agents
_ABORT_AGAIN_S = 0.1  # a request that reached the engine after an abort is not ended by it


@dataclass(eq=False)
class _Open:
    """A request whose `generate` has not returned."""

    request: GenerationRequest  # with what was sampled until it left the engine last
    asked: dict[int, int | None] = field(default_factory=dict)  # ids at the engine: of a sample's rest, or of all
    turn: "asyncio.Future[None] | None" = None  # while it waits to be asked
    aborted: bool = False

    @property
    def done(self) -> bool:
        sampled = self.request.sampled
        return self.aborted or (bool(sampled) and not any(sample.is_unfinished for sample in sampled))

    async def wait(self) -> None:
        """Return once it is woken."""
        self.turn = asyncio.get_running_loop().create_future()
        await self.turn

    def has(self, sampled: Sequence[Completion]) -> None:
        self.request = replace(self.request, sampled=tuple(sampled))

    def abort(self) -> None:
        self.aborted = True
        self.wake()

    def wake(self) -> None:
        if self.turn is not None and not self.turn.done():
            self.turn.set_result(None)


class ParkingEngine(WrappedEngine):
    """Samples by `inner`, and keeps the requests under way with what was sampled of them.

    `parks` says what happens between `park` and `resume`. ask_again: `inner` is told to abort what runs, so that it may
    sleep, drop its cache and get weights; then it is asked again with the tokens so far. pause: `inner` parks by
    itself, with the KV cache of what runs, and does not sleep while there is such a request. no: `inner` is never
    parked. New requests wait meanwhile.

    An engine that `continues` gets requests with what was `sampled`. Any other gets a request for the rest of each
    unfinished sample, whose prompt ends with the tokens so far, with random numbers of its own. There, stop strings and
    penalties are refused: they look back at tokens that would be part of the prompt.
    """

    def __init__(self, inner: RolloutEngine, parks: str = ASK_AGAIN, continues: bool = False):
        super().__init__(inner)
        self.parks, self.continues, self.can_park = parks, continues, parks != NO
        self._open: dict[int, _Open] = {}
        self._restored: dict[int, GenerationRequest] = {}  # by request id, until `generate`
        self._order: dict[int, int] = {}  # of the requests that an earlier process had under way
        self._is_parked = False
        self._num_asked, self._returned = 0, asyncio.Event()
        self._ids = itertools.count(_FIRST_ID)

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        if not self.continues:
            _refuse_looking_back(request)
        opened = self._open[request.request_id] = _Open(self._with_restored(request))
        try:
            while not opened.done:
                if self._is_parked:
                    await opened.wait()
                else:
                    await self._ask(opened)
        finally:
            if self._open.get(request.request_id) is opened:
                del self._open[request.request_id]
        return list(opened.request.sampled) or [Completion.empty(self.version)] * request.sampling.n

    def _with_restored(self, request: GenerationRequest) -> GenerationRequest:
        saved = self._restored.pop(request.request_id, None)
        if saved is None or saved.prompt_ids != request.prompt_ids:  # a turn may begin otherwise than before
            return request
        params, sampled = request.sampling, [*saved.sampled[: request.sampling.n]]
        sampled += [Completion.empty(self.version)] * (params.n - len(sampled))
        limited = (replace(s, stop_reason="length") if len(s.token_ids) >= params.max_tokens else s for s in sampled)
        return replace(request, sampled=tuple(limited))

    async def _ask(self, opened: _Open) -> None:
        """Sample until the request is complete or aborted."""
        request, sampled = opened.request, opened.request.sampled
        self._num_asked += 1
        try:
            if self.continues or not any(sample.token_ids or not sample.is_unfinished for sample in sampled):
                opened.asked[request.request_id] = None
                opened.has(await self.inner.generate(request))
                return
            async with asyncio.TaskGroup() as rests:
                for number in (number for number, sample in enumerate(sampled) if sample.is_unfinished):
                    rests.create_task(self._ask_for_rest(opened, number))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None  # the others were cancelled because of it
        finally:
            opened.asked.clear()
            self._num_asked -= 1
            self._returned.set()

    async def _ask_for_rest(self, opened: _Open, number: int) -> None:
        """Add what the engine answers, before anything else can ask what is in flight."""
        if opened.aborted:
            return
        rest = rest_of(opened.request, number, next(self._ids))
        opened.asked[rest.request_id] = number
        [part] = await self.inner.generate(rest)
        del opened.asked[rest.request_id]
        opened.has(_with_part(opened.request, number, part).sampled)

    async def park(self) -> None:
        self._is_parked = True
        if self.parks == PAUSE:
            return await self.inner.park()
        while self._num_asked:
            self._returned.clear()
            await self.inner.abort()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._returned.wait(), _ABORT_AGAIN_S)

    async def resume(self) -> None:
        if self.parks == PAUSE:
            await self.inner.resume()
        self._is_parked = False
        for _, opened in sorted(self._open.items(), key=lambda item: self._order.get(item[0], len(self._order))):
            opened.wake()

    async def in_flight(self) -> list[GenerationRequest]:
        running = {r.request_id: r for r in await self.inner.in_flight()} if self._num_asked else {}
        return [self._so_far(opened, running) for opened in self._open.values()]

    def _so_far(self, opened: _Open, running: dict[int, GenerationRequest]) -> GenerationRequest:
        request = opened.request
        for inner_id, number in opened.asked.items():
            if inner_id in running:
                now = running[inner_id].sampled
                request = replace(request, sampled=now) if number is None else _with_part(request, number, now[0])
        return request

    def restore(self, requests: Sequence[GenerationRequest]) -> None:
        self._restored = {request.request_id: request for request in requests}
        self._order = {request_id: place for place, request_id in enumerate(self._restored)}

    async def abort(self, request_id: int | None = None) -> None:
        for number, opened in tuple(self._open.items()):
            if request_id in (None, number):
                opened.abort()
                for inner_id in tuple(opened.asked):
                    await self.inner.abort(inner_id)

    @property
    def _holds(self) -> bool:
        """Whether requests wait in the inner engine with their KV cache."""
        return self.parks == PAUSE and self._is_parked and self._num_asked > 0

    async def sleep(self) -> None:
        if not self._holds:
            await super().sleep()

    async def sleep_until_update(self) -> None:
        if not self._holds:
            await super().sleep_until_update()


def rest_of(request: GenerationRequest, number: int, request_id: int) -> GenerationRequest:
    """The rest of one sample, as a request for one answer to its prompt and its tokens so far."""
    params, tokens = request.sampling, request.sampled[number].token_ids
    count = len(tokens)
    rest = replace(params, n=1, max_tokens=params.max_tokens - count, min_tokens=max(params.min_tokens - count, 0))
    stream = derive_seed(request.stream_id, number, count)
    return GenerationRequest(request_id, request.prompt_ids + tokens, rest, request.conversation, stream)


def _with_part(request: GenerationRequest, number: int, part: Completion) -> GenerationRequest:
    sampled = [*request.sampled]
    sampled[number] = joined(sampled[number], part)
    return replace(request, sampled=tuple(sampled))


def _refuse_looking_back(request: GenerationRequest) -> None:
    params = request.sampling
    if params.stop or params.has_penalties:
        raise WorkerError(
            0, "generate",
            f"request {request.request_id} has stop={list(params.stop)} and penalties "
            f"({params.frequency_penalty:g}, {params.presence_penalty:g}, {params.repetition_penalty:g}): a "
            "parked answer goes on as a new prompt, in which the engine does not look for them; use "
            "stop_token_ids, or async_training.staleness_threshold=0",
        )  # fmt: skip
