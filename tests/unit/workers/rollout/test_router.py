"""Which replica a router chooses, what a choice costs, and what it does about replicas that are lost."""

import asyncio
import contextlib
import math
import random
from typing import Any

import pytest

from verl.utils.errors import WorkerError
from verl.weight_sync.copy_sync import CopySync
from verl.workers.rollout.base import (
    Completion,
    CopyingEngine,
    GenerationRequest,
    SamplingParams,
    StaleWeightsError,
)
from verl.workers.rollout.engine_stats import EngineStats
from verl.workers.rollout.router import Router
from verl.workers.rollout.tournament_tree import LeastLoaded


class CountedList(list):
    """A list that counts how often its items are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        CountedList.reads += 1
        return super().__getitem__(index)


class Replica(CopyingEngine):
    """Answers when it is told to, unless it is lost before."""

    bucket_bytes = version = 0

    def __init__(self, fails_to_start: bool = False) -> None:
        self.requests: list[GenerationRequest] = []
        self.go_on = asyncio.Event()
        self.fails_to_start = fails_to_start

    def wait_until_ready(self) -> None:
        if self.fails_to_start:
            raise WorkerError(0, "start", "no memory")

    def die(self) -> None:
        self.lost = "its process ended with signal SIGKILL; its last lines:\n  Killed"
        self.go_on.set()

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        self.requests.append(request)
        await self.go_on.wait()
        if self.lost:
            raise WorkerError(0, "generate", self.lost)
        return [Completion([5, 6, 7], [-1.0] * 3, "stop", (0, 0))]

    async def stream(self, request: GenerationRequest, on_tokens: Any) -> list[Completion]:
        on_tokens(0, [5], [-1.0])
        return await self.generate(request)

    async def _nothing(self, *args: Any) -> Any: ...

    begin_update = finish_update = sleep = wake = abort = _nothing

    async def stats(self) -> list[EngineStats]:
        if self.lost:
            raise WorkerError(0, "stats", self.lost)
        return [EngineStats({"answers": len(self.requests)})]


def start(number: int, fails: bool = False) -> Replica:
    """The replacement of replica `number`."""
    replica = Replica(fails)
    replica.go_on.set()
    return replica


def start_slowly(number: int) -> Replica:
    """A replacement that has not started yet."""
    replica = start(number)
    replica.has_started = False
    return replica


class OtherTokens(Replica):
    """Samples other tokens than `Replica`."""

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        return [Completion([8, 6, 7], [-1.0] * 3, "stop", (0, 0))]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 100])
def test_the_first_of_the_least_loaded_replicas_is_chosen(count: int):
    tree, loads, generator = LeastLoaded(count), [0] * count, random.Random(count)
    for _ in range(500):
        assert tree.least == min(range(count), key=lambda i: (loads[i], i))
        replica = generator.randrange(count)
        loads[replica] = max(loads[replica] + generator.randint(-3, 5), 0)
        tree[replica] = loads[replica]
        assert tree[replica] == loads[replica]


def reads_per_request(count: int, requests: int = 200) -> float:
    """Loads that a router of `count` replicas reads to choose one for a request and to note its end."""

    async def send() -> None:
        router = Router([Replica() for _ in range(count)])
        router.load._loads = CountedList(router.load._loads)
        sampling = SamplingParams(max_tokens=5)
        waiting = [
            asyncio.create_task(router.generate(GenerationRequest(i, [1], sampling, conversation=i % 7 or None)))
            for i in range(requests)
        ]
        await asyncio.sleep(0)
        for replica in router.engines:
            replica.go_on.set()
        await asyncio.gather(*waiting)

    CountedList.reads = 0
    asyncio.run(send())
    return CountedList.reads / requests


def test_a_choice_costs_the_logarithm_of_the_number_of_replicas():
    """One comparison of two loads per level of the tree, when a request begins and when it ends."""
    for count in (10, 100, 1000):
        assert reads_per_request(count) <= 2 * (2 * math.ceil(math.log2(count)) + 1)


def test_requests_are_spread_and_conversations_stay():
    async def send() -> list[list[int]]:
        router = Router([Replica() for _ in range(3)])
        sampling = SamplingParams(max_tokens=9)
        requests = [GenerationRequest(i, [1], sampling) for i in range(6)]
        requests += [GenerationRequest(10 + turn, [1], conversation=5) for turn in range(3)]
        waiting = [asyncio.create_task(router.generate(request)) for request in requests]
        await asyncio.sleep(0)
        asked = [[request.request_id for request in replica.requests] for replica in router.engines]
        for replica in router.engines:
            replica.go_on.set()
        await asyncio.gather(*waiting)
        return asked

    assert asyncio.run(send()) == [[0, 3, 10, 11, 12], [1, 4], [2, 5]]


async def lose(router: Router, number: int, requests: int = 6, stream: bool = False) -> tuple[list[Any], list[Any]]:
    """What `requests` at once get, and the tokens streamed, when replica `number` dies among them."""
    tokens: list[Any] = []

    async def ask(i: int) -> list[Completion]:
        request = GenerationRequest(i, [1], SamplingParams(max_tokens=9), conversation=i)
        if stream:
            return await router.stream(request, lambda sample, ids, logprobs: tokens.append((i, ids)))
        return await router.generate(request)

    waiting = [asyncio.create_task(ask(i)) for i in range(requests)]
    await asyncio.sleep(0)
    router.engines[number].die()
    for other in router.engines:
        other.go_on.set()
    return await asyncio.gather(*waiting), tokens


def test_requests_of_a_lost_replica_are_answered_once_by_the_others():
    async def go() -> None:
        started: list[int] = []
        router = Router([Replica() for _ in range(3)], lambda number: started.append(number) or start(number), 2)
        await router.finish_update(0)
        answers, _ = await lose(router, 1)
        assert [len(answer) for answer in answers] == [1] * 6 and started == [1]
        asked = sorted(request.request_id for replica in router.replicas for request in replica.requests)
        assert asked == list(range(6)) and 1 not in router.replica_of_conversation.values()
        answered = [stats.totals.get("answers", 0) for stats in await router.stats()]
        assert sum(answered) == 6 and answered[1] == 0
        lost = router.engines[1]
        await router.renew()
        assert router.engines[1] is not lost and len(router.replicas) == 3 and router.load[1] == 0

    asyncio.run(go())


def test_no_replica_is_replaced_more_often_than_allowed():
    async def go() -> None:
        router = Router([Replica() for _ in range(3)], lambda number: start(number, fails=True), 2)
        await router.finish_update(0)
        await lose(router, 1)
        await router.renew()  # the first replacement does not start; nor will the second
        assert router.restarts == [0, 2, 0]
        told = r"(?s)replica 1: its replacement did not start: .*no memory.*replaced 2 times .*max_restarts=2.*dmesg"
        with pytest.raises(WorkerError, match=told) as caught:
            await router.renew()
        assert not caught.value.is_death and str(caught.value).startswith("rollout replica 1: ")  # no rank is lost

    asyncio.run(go())


@pytest.mark.parametrize("fails_to_start", [False, True])
def test_on_shared_devices_a_replacement_starts_when_the_replicas_wake_and_sleeps_with_them(fails_to_start: bool):
    async def go() -> None:
        started, calls = list[Any](), list[str]()

        def begin(number: int) -> Replica:
            started.append(replica := start_slowly(number))
            replica.fails_to_start, replica.close = fails_to_start, lambda: calls.append("close")
            replica.sleep = note_sleep
            return replica

        async def note_sleep() -> None:
            calls.append("sleep")

        router = Router([Replica() for _ in range(3)], begin, 2, shares_devices=True)
        await router.finish_update(0)
        await router.sleep_until_update()
        router.engines[1].die()
        await router.renew()
        assert not started and router.replica_numbers == [0, 2]  # the trainer has the devices
        await router.wake()
        assert len(started) == 1 and list(router.starting) == [1]
        falling_asleep = asyncio.create_task(router.sleep_until_update())
        await asyncio.sleep(0.2)
        assert not falling_asleep.done()
        started[0].has_started = True
        await asyncio.wait_for(falling_asleep, 10)
        assert calls == ["sleep", "close"][: 1 + fails_to_start]
        await router.renew()
        assert len(started) == 1 and router.restarts == [0, 1 + fails_to_start, 0]
        assert (router.engines[1] is started[0]) is not fails_to_start
        await router.wake()
        assert len(started) == 1 + fails_to_start

    asyncio.run(go())


@pytest.mark.parametrize("fails_to_start", [False, True])
def test_without_updates_the_others_answer_for_a_replica_that_is_lost_for_good(fails_to_start: bool):
    async def go() -> None:
        router = Router([Replica() for _ in range(4)], lambda number: start(number, fails=True), int(fails_to_start))
        answers, _ = await lose(router, 1, 8)
        assert len(answers) == 8
        more = [router.generate(GenerationRequest(100 + i, [1], conversation=i % 8)) for i in range(20)]
        assert len(await asyncio.gather(*more)) == 20
        assert router.replica_numbers == [0, 2, 3] and not router.starting and router.lost_replicas == [1]
        assert router.lost is None and len(await router.stats()) == 4
        with pytest.raises(WorkerError, match="replica 1: "):  # weights would be published
            await router.renew()
        for number in (0, 2, 3):
            with contextlib.suppress(WorkerError):
                await lose(router, number)
            if fails_to_start:
                await asyncio.sleep(0)
        with pytest.raises(WorkerError, match="replica"):
            await asyncio.wait_for(router.generate(GenerationRequest(200, [1])), 10)
        if not fails_to_start:
            assert router.lost_replicas == [0, 1, 2, 3] and router.lost is not None

    asyncio.run(go())


def test_an_error_of_a_replica_that_works_is_no_loss():
    async def go() -> None:
        router = Router([Replica() for _ in range(3)], None, 2)
        with pytest.raises(WorkerError, match="SIGKILL"):
            await lose(router, 1)
        router = Router([Replica() for _ in range(3)], start, 2)
        for replica in router.engines:
            replica.fails_to_start = True
        with pytest.raises(WorkerError, match="no memory"):
            await router._each(lambda engine: asyncio.to_thread(engine.wait_until_ready))
        assert not router.starting

    asyncio.run(go())


def test_a_stream_goes_on_after_the_tokens_that_a_lost_replica_has_sent():
    async def go(router: Router) -> list[Any]:
        return (await lose(router, 0, requests=2, stream=True))[1]

    streamed = asyncio.run(go(Router([Replica() for _ in range(2)], start, 2)))
    assert sorted(token for i, ids in streamed for token in ids if i == 0) == [5, 6, 7]


def test_a_stream_ends_where_another_replica_samples_other_tokens():
    async def go() -> None:
        router = Router([Replica(), OtherTokens()], start, 2)
        await router.finish_update(0)  # so that the replacement does not join at once
        await lose(router, 0, requests=1, stream=True)

    with pytest.raises(WorkerError, match=r"had sent 1 tokens .* samples other tokens"):
        asyncio.run(go())


def test_a_publish_names_a_replica_by_its_number_while_another_is_lost():
    async def go(router: Router) -> None:
        await lose(router, 0)
        router.engines[2].version = 7
        await CopySync(lambda: [], router).publish(1)

    replicas = [Replica() for _ in range(3)]
    replicas[1].version = 1
    with pytest.raises(StaleWeightsError, match="replica 2 says that it samples from version 7 after 1 was sent"):
        asyncio.run(go(Router(replicas, start_slowly, 1)))


def test_a_request_that_was_aborted_is_not_sent_again_when_its_replica_dies():
    async def go() -> None:
        router = Router([Replica() for _ in range(2)], start_slowly, 1)
        asked = asyncio.create_task(router.generate(GenerationRequest(5, [1], SamplingParams(n=2))))
        await asyncio.sleep(0)
        await router.abort(5)
        router.engines[0].die()
        assert [completion.stop_reason for completion in await asked] == ["aborted"] * 2
        assert router.engines[1].requests == [] and not router._aborted

    asyncio.run(go())


def test_counts_go_on_exactly_where_a_replica_is_replaced():
    """A reading that began before the loss and ends after it is of an engine that no longer counts."""

    async def go() -> None:
        router = Router([Replica() for _ in range(2)], start_slowly, 1)
        lost, late = router.engines[1], asyncio.Event()
        await router.finish_update(0)
        totals = {"answers": 100.0}
        lost.stats = lambda: answer(None)

        async def answer(wait: asyncio.Event | None) -> list[EngineStats]:
            if wait is not None:
                await wait.wait()
            return [EngineStats(totals, {"steps": 10.0}, {"share": (1.0, 2.0)})]

        await router.stats()
        lost.stats = lambda: answer(late)
        slow = asyncio.create_task(router.stats())
        await asyncio.sleep(0)
        lost.die()
        router._replace(1, lost, WorkerError(1, "generate", "gone"))
        new = router.starting[1]
        new.has_started = True
        await router.renew()
        assert router.engines[1] is new
        late.set()
        assert (await slow)[1].totals == totals  # not twice
        new.requests.append(GenerationRequest(1, [1]))
        [_, now] = await router.stats()
        assert now == EngineStats({"answers": 101.0}, {"steps": 10.0}, {"share": (1.0, 2.0)})

    asyncio.run(go())


def test_a_replacement_sleeps_with_the_others_and_wakes_when_it_joins():
    async def go() -> None:
        calls: list[str] = []

        def start_logged(number: int) -> Replica:
            replica = start_slowly(number)

            async def log(what: str) -> None:
                calls.append(what)

            replica.sleep, replica.wake = lambda: log("sleep"), lambda: log("wake")
            return replica

        router = Router([Replica() for _ in range(2)], start_logged, 1)
        await router.finish_update(0)
        await router.sleep()
        router.engines[1].die()
        await router.stats()
        await asyncio.sleep(0)
        assert calls == ["sleep"]
        router.starting[1].has_started = True
        await router.renew()
        assert calls == ["sleep", "wake"] and router.replica_numbers == [0, 1]

    asyncio.run(go())
