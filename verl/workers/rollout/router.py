"""Routes each request to the least loaded replica, and all turns of a conversation to the same replica."""

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from verl.observe.served_requests import served_by
from verl.utils.errors import ReplicaError, WorkerError
from verl.workers.rollout.base import Completion, CopyingEngine, GenerationRequest, StaleWeightsError, TokenCallback
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.remote.profiles import ProfiledServer
from verl.workers.rollout.tournament_tree import LeastLoaded

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
_MAX_CONVERSATIONS = 100_000  # conversations whose replica is remembered


class Router(ProfiledServer, CopyingEngine):
    """Balances the tokens (prompt + max_tokens) of running requests; all replicas hold one version of the weights.

    A replica that is lost is replaced by what `start(number)` gives, at most `max_restarts` times each. Its requests go
    to the others at once; the new one joins at the next update that begins after it has started, or, where weights are
    never updated, as soon as it has started. One that may not be replaced again is left out; that is an error where no
    other works, and where weights are updated. Without `start`, every loss is an error.

    With `shares_devices`, others use the devices while the replicas sleep: a replacement starts when they wake, and
    they sleep when one that starts has started.
    """

    def __init__(
        self,
        engines: Sequence[CopyingEngine],
        start: Callable[[int], CopyingEngine] | None = None,
        max_restarts: int = 0,
        shares_devices: bool = False,
    ):
        self.engines = list(engines)  # by number; one that is lost until its replacement joins
        self.start, self.max_restarts, self.shares_devices = start, max_restarts, shares_devices
        self.bucket_bytes, self.dtype = engines[0].bucket_bytes, engines[0].dtype
        self.load = LeastLoaded(len(self.engines))
        self.replica_of_conversation: OrderedDict[int, int] = OrderedDict()
        self.replica_of_request: dict[int, int] = {}
        self.starting: dict[int, CopyingEngine] = {}  # by number of the replica that is lost
        self.put_off: set[int] = set()  # lost replicas whose replacements start when the others wake
        self.left_out: dict[int, ReplicaError] = {}  # lost for good, by number
        self.restarts = [0] * len(self.engines)
        self._tokens = [0] * len(self.engines)  # of the requests that run, also where `load` is infinite
        self._ended = [[EngineStats()]] * len(self.engines)  # counts of the engines that were lost
        self._known = [[EngineStats()]] * len(self.engines)  # the last statistics
        self._is_asleep = self._is_updated = self._is_parked = False
        self._aborted: set[int] = set()  # requests that run
        self._falling_asleep: set[asyncio.Task[None]] = set()

    @property
    def replicas(self) -> Sequence[CopyingEngine]:
        return [self.engines[number] for number in self.replica_numbers]

    @property
    def replica_numbers(self) -> Sequence[int]:
        return [number for number in range(len(self.engines)) if self._works(number)]

    @property
    def lost_replicas(self) -> Sequence[int]:  # type: ignore[override]
        return sorted(self.left_out)

    @property
    def metrics_addresses(self) -> Sequence[str]:  # type: ignore[override]
        return [address for engine in self.replicas for address in engine.metrics_addresses]

    @property
    def lost(self) -> str | None:  # type: ignore[override]
        return str(self.left_out[0]) if len(self.left_out) == len(self.engines) else None

    @property
    def response_formats(self) -> Collection[str]:  # type: ignore[override]
        return self.engines[0].response_formats

    @property
    def receivers(self) -> Sequence[CopyingEngine]:
        return self.replicas if self.engines[0].out_of_process else [self]

    @property
    def version(self) -> int:
        versions = {engine.version for engine in self.replicas}
        if len(versions) > 1:
            raise StaleWeightsError(f"replicas hold different versions: {[engine.version for engine in self.replicas]}")
        return versions.pop()

    def _works(self, number: int) -> bool:
        return number not in self.starting and number not in self.left_out and number not in self.put_off

    def pick_replica(self, conversation: int | None) -> int:
        """The replica of an earlier turn of this conversation, else the least loaded."""
        if conversation is None:
            return self.load.least
        known = self.replica_of_conversation.get(conversation)
        replica = self.load.least if known is None or not self._works(known) else known
        self.replica_of_conversation[conversation] = replica
        self.replica_of_conversation.move_to_end(conversation)
        if len(self.replica_of_conversation) > _MAX_CONVERSATIONS:
            self.replica_of_conversation.popitem(last=False)  # the one that has rested longest
        return replica

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return await self._send(request, lambda engine: engine.generate(request))

    async def stream(self, request: GenerationRequest, on_tokens: TokenCallback) -> list[Completion]:
        sent: defaultdict[int, list[int]] = defaultdict(list)  # tokens by sample

        def forward(sample: int, token_ids: list[int], *more: Any) -> None:
            sent[sample] += token_ids
            on_tokens(sample, token_ids, *more)

        async def call(engine: CopyingEngine) -> list[Completion]:
            if not sent:
                return await engine.stream(request, forward)
            completions = await engine.generate(request)  # again, on another replica
            for sample, completion in enumerate(completions):
                _send_rest(sample, completion, sent[sample], on_tokens)
            return completions

        return await self._send(request, call)

    async def _send(
        self, request: GenerationRequest, call: Callable[[CopyingEngine], Awaitable[list[Completion]]]
    ) -> list[Completion]:
        """The answer of one replica; of another if that one is lost before it has answered."""
        while True:
            if self.starting and not self._is_updated:
                await self._take_in()
            if self.left_out and len(self.starting) + len(self.left_out) == len(self.engines):
                raise next(reversed(self.left_out.values()))
            number = self.pick_replica(request.conversation)
            engine = self.engines[number]
            self.replica_of_request[request.request_id] = number
            cost = request.sampling.n * (len(request.prompt_ids) + request.sampling.max_tokens)
            self._add_load(number, cost)
            try:
                with served_by(number):
                    return await call(engine)
            except WorkerError as error:
                self._replace(number, engine, error)
                if request.request_id in self._aborted:  # nobody waits for it
                    return [Completion([], [], "aborted", (0, 0))] * request.sampling.n
            finally:
                self._add_load(number, -cost)
                self.replica_of_request.pop(request.request_id, None)
                self._aborted.discard(request.request_id)

    def _add_load(self, number: int, tokens: int) -> None:
        self._tokens[number] += tokens
        self.load[number] = self._tokens[number] if self._works(number) else math.inf

    def _replace(self, number: int, engine: CopyingEngine, error: BaseException) -> None:
        """Start another in the place of a lost engine; raises `error` where it works, or cannot be replaced."""
        if engine.lost is None or self.start is None:
            raise error
        if self.engines[number] is engine and self._works(number):
            self._ended[number] = [replace(stats, gauges={}) for stats in self._known[number]]
            self._start_again(number, engine.lost)

    def _start_again(self, number: int, how: str) -> None:
        assert self.start is not None
        others, used = len(set(self.replica_numbers) - {number}), self.restarts[number]
        lost = f"rollout replica {number}: {how}"
        limit = f"actor_rollout_ref.rollout.server.max_restarts={self.max_restarts}"
        if used >= self.max_restarts or not others:
            why = f"it was replaced {used} times" if others else "no replica is left that could answer for it"
            error = ReplicaError(
                number, "generate",
                f"{lost}\n{why} ({limit}). Its last lines say why it ended; SIGKILL without a cause in them is most "
                "often the system, out of memory (dmesg): lower rollout.gpu_memory_utilization or max_num_seqs. Raise "
                "the key if its machine is to blame. Started again, the run resumes from its last checkpoint",
            )  # fmt: skip
            if used >= self.max_restarts:
                self._leave_out(number, error)
            if others and not self._is_updated:
                logger.error("%s\nthe %d others answer its requests", error, others)
                return
            raise error
        self.restarts[number] += 1
        waits = self.shares_devices and self._is_asleep
        logger.warning(
            "%s\nits requests go to the %d others; a new process starts%s and joins %s (replacement %d of at most %s)",
            lost, others, " when they wake" if waits else "",
            "at the next update of the weights" if self._is_updated else "when it has started", used + 1, limit,
        )  # fmt: skip
        self.engines[number].close()
        self.starting.pop(number, None)
        self.put_off.add(number)
        self.load[number] = math.inf
        if not waits:
            self._start_replacements()

    def _start_replacements(self) -> None:
        while self.put_off:
            assert self.start is not None
            number = self.put_off.pop()
            engine = self.starting[number] = self.start(number)
            if self._is_asleep:
                self._let_sleep(engine)

    def _leave_out(self, number: int, error: ReplicaError) -> None:
        """Send nothing more to a replica that is lost for good."""
        self.starting.pop(number, None)
        self.left_out[number] = error
        self._add_load(number, 0)
        self.engines[number].close()

    def _let_sleep(self, engine: CopyingEngine) -> None:
        """Put an engine to sleep that has not started yet; nobody waits for it."""

        async def sleep() -> None:
            with contextlib.suppress(WorkerError):  # it did not start, which `_take_in` notices
                await engine.sleep()

        self._falling_asleep.add(task := asyncio.create_task(sleep()))
        task.add_done_callback(self._falling_asleep.discard)

    async def _take_in(self) -> None:
        """Let the replacements join that have started; start those again that could not."""
        for number, engine in list(self.starting.items()):
            if not engine.has_started:
                continue
            try:
                engine.wait_until_ready()
                await engine.wake()
                if self._is_parked:
                    await engine.park()
                problem = ""
            except WorkerError as error:
                what = "did not start" if engine.lost is None else "ended"
                problem = f"its replacement {what}: {error.remote_traceback}"
            if self.starting.get(number) is not engine:  # another request has seen to it meanwhile
                continue
            if problem:
                engine.close()
                self._start_again(number, problem)
                continue
            del self.starting[number]
            self.engines[number] = engine
            self._add_load(number, 0)
            logger.warning("rollout replica %d: its replacement has started and joins", number)

    async def renew(self) -> None:
        if self.start is not None:
            await self.stats()  # returns when every replica has answered or is given up
            await self._take_in()
        for error in self.left_out.values():
            raise error

    async def _each(self, call: Callable[[CopyingEngine], Coroutine[Any, Any, Result]]) -> dict[int, Result]:
        """Results by number of the replicas that work; those that are lost are replaced."""
        engines = {number: self.engines[number] for number in self.replica_numbers}
        results = await asyncio.gather(*map(call, engines.values()), return_exceptions=True)
        answers: dict[int, Result] = {}
        for (number, engine), result in zip(engines.items(), results, strict=True):
            if isinstance(result, BaseException):
                self._replace(number, engine, result)
            elif self.engines[number] is engine and self._works(number):  # else it was lost meanwhile
                answers[number] = result
        return answers

    async def abort(self, request_id: int | None = None) -> None:
        self._aborted |= self.replica_of_request.keys() & (
            {request_id} if request_id is not None else self.replica_of_request
        )
        if request_id is None:
            await self._each(lambda engine: engine.abort())
        elif request_id in self.replica_of_request:
            number = self.replica_of_request[request_id]
            engine = self.engines[number]
            try:
                await engine.abort(request_id)
            except WorkerError as error:
                self._replace(number, engine, error)

    async def park(self) -> None:
        self._is_parked = True
        await self._each(lambda engine: engine.park())

    async def resume(self) -> None:
        self._is_parked = False
        await self._each(lambda engine: engine.resume())

    async def in_flight(self) -> list[GenerationRequest]:
        return [request for requests in (await self._each(lambda e: e.in_flight())).values() for request in requests]

    async def begin_update(self) -> None:
        await asyncio.gather(*(engine.begin_update() for engine in self.replicas))

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
        arrived = await asyncio.gather(*(engine.load_bucket(bucket) for engine in self.replicas))
        return [replica for engine in arrived for replica in engine]

    async def finish_update(self, version: int) -> None:
        self._is_updated = True
        await asyncio.gather(*(engine.finish_update(version) for engine in self.replicas))

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return await self.replicas[0].compute_logprobs(sequences)

    async def set_profiling(self, on: bool) -> None:
        for engine in self.replicas:  # one that cannot is not lost
            if isinstance(engine, ProfiledServer):
                await engine.set_profiling(on)

    async def sleep(self) -> None:
        await self._all_sleep(lambda engine: engine.sleep())

    async def sleep_until_update(self) -> None:
        await self._all_sleep(lambda engine: engine.sleep_until_update())

    async def _all_sleep(self, call: Callable[[CopyingEngine], Coroutine[Any, Any, None]]) -> None:
        self._is_asleep = True
        starting = list(self.starting.values())
        for engine in starting:
            self._let_sleep(engine)
        await self._each(call)
        if self.shares_devices:
            await asyncio.gather(*map(self._wait_until_asleep, starting))

    async def _wait_until_asleep(self, engine: CopyingEngine) -> None:
        """Wait until an engine that starts has done so and sleeps; one that cannot start is closed."""
        while not engine.has_started:
            await asyncio.sleep(0.05)
        try:
            engine.wait_until_ready()
        except WorkerError:  # `_take_in` says so
            engine.close()
        await asyncio.gather(*self._falling_asleep)

    async def wake(self) -> None:
        self._is_asleep = False
        self._start_replacements()
        await self._each(lambda engine: engine.wake())

    def close(self) -> None:
        for engine in (*self.engines, *self.starting.values()):
            engine.close()

    async def stats(self) -> list[EngineStats]:
        """Counters of each replica, with those of the replicas whose place it took."""
        for number, now in (await self._each(lambda engine: engine.stats())).items():
            ended = self._ended[number]
            is_first = not self.restarts[number]
            self._known[number] = now if is_first else [s.continuing(e) for s, e in zip(now, ended, strict=True)]
        known = zip(self._known, self._ended, range(len(self.engines)), strict=True)
        return [stats for now, ended, number in known for stats in (now if self._works(number) else ended)]


def _send_rest(sample: int, completion: Completion, sent: list[int], on_tokens: TokenCallback) -> None:
    """Pass on what follows the tokens that another replica has sent; WorkerError where they are not the same."""
    count = len(sent)
    if completion.token_ids[:count] != sent:
        raise WorkerError(
            0, "stream",
            f"the replica that had sent {count} tokens was lost, and another one samples other tokens, so that the "
            "answer cannot go on; ask again",
        )  # fmt: skip
    if rest := completion.token_ids[count:]:
        more = () if completion.alternatives is None else (completion.alternatives[count:],)
        on_tokens(sample, rest, completion.logprobs[count:], *more)
