"""Limits of calls: exact, in order, shared by the process; on an injected clock."""

import asyncio
import threading
import time

import pytest

from verl.config import ConfigError, load_config
from verl.rewards.bounded_calls import CallPool, RewardTimeoutError, TooManyHangingCallsError
from verl.rewards.call_limits import CallLimits, LimitedCalls, limits_of_process


class Time:
    """A clock that jumps to the next sleeper's time once all others wait."""

    def __init__(self):
        self.now, self.sleepers = 1000.0, []

    def clock(self):
        return self.now

    async def sleep(self, seconds):
        woken = asyncio.get_running_loop().create_future()
        self.sleepers.append((self.now + seconds, woken))
        await woken

    async def run(self, *coroutines):
        tasks = [asyncio.ensure_future(one) for one in coroutines]
        while not all(task.done() for task in tasks):
            for _ in range(20):  # whoever can go on does
                await asyncio.sleep(0)
            if self.sleepers:
                self.sleepers.sort(key=lambda one: one[0])
                self.now, woken = self.sleepers.pop(0)
                woken.set_result(None)
        return [task.result() for task in tasks]


def starts_of(calls, lasts_s=0.0, pause=None, **limits):
    """(number, seconds since the beginning) of each call's start, in order, and the most that ran at once."""
    time, starts, running, most = Time(), [], 0, 0
    limits = CallLimits(clock=time.clock, sleep=time.sleep, **limits)

    async def call(number):
        nonlocal running, most
        if pause and number >= pause[0]:
            await time.sleep(pause[1])
        async with limits.turn():
            starts.append((number, time.now - 1000))
            running += 1
            most = max(most, running)
            await time.sleep(lasts_s)
            running -= 1

    async def main():
        await time.run(*map(call, range(calls)))

    asyncio.run(main())
    return starts, most


def test_calls_start_exactly_at_their_rate_and_in_order():
    starts, _ = starts_of(100, max_concurrent=100, per_minute=30)
    assert starts == [(number, 2.0 * number) for number in range(100)]


@pytest.mark.parametrize("per_minute", [1, 7, 59, 500])
def test_no_minute_has_more_starts_than_allowed_and_a_busy_one_has_all(per_minute):
    starts, _ = starts_of(3 * per_minute + 1, max_concurrent=1000, per_minute=per_minute)
    times = [time for _, time in starts]
    for first in times:
        count = sum(first <= time < first + 60 - 1e-6 for time in times)
        assert count == per_minute or (count < per_minute and first > 120)


def test_a_pause_saves_up_no_burst():
    starts, _ = starts_of(6, pause=(2, 600.0), max_concurrent=6, per_minute=60)
    assert [time for _, time in starts] == [0, 1, 600, 601, 602, 603]


def test_no_more_calls_run_than_allowed_and_the_others_follow_in_order():
    starts, most = starts_of(9, lasts_s=5.0, max_concurrent=3, per_minute=None)
    assert most == 3 and starts == [(number, 5.0 * (number // 3)) for number in range(9)]


def test_the_slower_of_both_limits_counts():
    starts, most = starts_of(5, lasts_s=30.0, max_concurrent=1, per_minute=60)
    assert most == 1 and [time for _, time in starts] == [0, 30, 60, 90, 120]


def test_who_is_cancelled_gives_its_turn_to_the_next():
    async def main():
        limits, order = CallLimits(1, None), []

        async def call(name):
            async with limits.turn():
                order.append(name)
                await asyncio.sleep(0)

        async with limits.turn():
            tasks = {name: asyncio.ensure_future(call(name)) for name in "abcd"}
            await asyncio.sleep(0)
            tasks["b"].cancel()  # while it waits
        tasks["a"].cancel()  # after it was given its turn
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert order == ["c", "d"]
        async with asyncio.timeout(5):
            await call("last")

    asyncio.run(main())


def test_two_event_loops_share_one_limit():
    limits, running, most, lock = CallLimits(2, None), 0, 0, threading.Lock()

    def function():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1
        return 1.0

    def loop():
        outcomes = asyncio.run(LimitedCalls(CallPool(function, 8, 5.0), limits).run([{}] * 10))
        done.extend(outcome.result for outcome in outcomes)

    done = []
    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [1.0] * 30 and most == 2


@pytest.mark.parametrize("how", ["timed out", "cancelled"])
@pytest.mark.parametrize("kind", ["thread", "async"])
def test_a_call_that_was_given_up_keeps_its_turn_until_it_has_ended(kind, how):
    running, most, lock, has_begun = 0, 0, threading.Lock(), threading.Event()

    def count(step):
        nonlocal running, most
        with lock:
            running += step
            most = max(most, running)
        has_begun.set()

    def function(number):
        count(1)
        time.sleep(1.0 if number == 0 else 0.01)
        count(-1)

    async def stubborn(number):
        count(1)
        end = time.monotonic() + (1.0 if number == 0 else 0.01)
        while (left := end - time.monotonic()) > 0:
            try:
                await asyncio.sleep(left)
            except asyncio.CancelledError:
                continue
        count(-1)

    async def main():
        if how == "timed out":
            first, *others = await calls.run([{"number": number} for number in range(4)])
            assert isinstance(first.error, RewardTimeoutError)
        else:
            first = asyncio.create_task(calls.run([{"number": 0}]))
            await asyncio.to_thread(has_begun.wait, 30)
            first.cancel()
            others = await calls.run([{"number": number} for number in range(1, 4)])
            assert first.cancelled()
        assert [one.error for one in others] == [None] * 3

    limit_s = 0.2 if how == "timed out" else 5.0
    calls = LimitedCalls(CallPool(function if kind == "thread" else stubborn, 4, limit_s), CallLimits(1, None))
    asyncio.run(main())
    assert most == 1 and running == 0


def test_a_call_that_is_cancelled_before_a_thread_takes_it_gives_its_turn_back():
    ends, pool = threading.Event(), None

    async def main():
        busy = asyncio.create_task(pool.run([{"number": 0}]))
        await asyncio.sleep(0.1)
        waits = asyncio.create_task(calls.run([{"number": 1}]))  # it has a turn, and no thread
        await asyncio.sleep(0.1)
        waits.cancel()
        await asyncio.wait({waits})
        async with asyncio.timeout(5), limits.turn():
            ends.set()
        assert (await busy)[0].error is None

    limits, pool = CallLimits(1, None), CallPool(lambda number: ends.wait(30), 1, None)
    calls = LimitedCalls(pool, limits)
    asyncio.run(main())


def test_calls_that_were_given_up_and_never_end_are_an_error(monkeypatch):
    monkeypatch.setattr("verl.rewards.call_limits.LONGEST_KEPT_S", 0.3)
    ends = threading.Event()
    calls = LimitedCalls(CallPool(lambda: ends.wait(60), 4, 0.1), CallLimits(2, None))
    with pytest.raises(TooManyHangingCallsError, match=r"all reward\.max_concurrent=2 calls were given up"):
        asyncio.run(calls.run([{}] * 3))
    ends.set()


async def take(limits, order=None, name=None):
    async with limits.turn():
        if order is not None:
            order.append(name)


def test_a_turn_goes_past_who_waits_in_an_event_loop_that_is_stopped():
    limits, other, order = CallLimits(1, None), asyncio.new_event_loop(), []

    async def main():
        async with limits.turn():
            waits = other.create_task(take(limits, order, "other"))
            await asyncio.to_thread(other.run_until_complete, asyncio.sleep(0.05))
        async with asyncio.timeout(5):
            await take(limits, order, "here")
        return waits

    waits = asyncio.run(main())
    other.run_until_complete(asyncio.wait_for(waits, 5))  # it has its turn when its loop runs again
    other.close()
    assert order == ["here", "other"]


def test_a_turn_that_an_event_loop_got_while_it_stopped_is_taken_back():
    limits, other, order = CallLimits(1, None), asyncio.new_event_loop(), []
    stops, given = threading.Event(), threading.Event()

    def stop():
        other.stop()
        stops.set()
        given.wait(10)  # what is given now, the loop does not hear of

    async def main():
        async with limits.turn():
            waits = other.create_task(take(limits, order, "other"))
            other.call_later(0.1, stop)
            thread = threading.Thread(target=other.run_forever)
            thread.start()
            await asyncio.to_thread(stops.wait, 10)
        here = asyncio.ensure_future(take(limits, order, "here"))
        await asyncio.sleep(0)
        given.set()
        await asyncio.to_thread(thread.join)
        async with asyncio.timeout(5):
            await here
        return waits

    waits = asyncio.run(main())
    other.run_until_complete(asyncio.wait_for(waits, 5))
    other.close()
    assert order == ["here", "other"]


def limited(*overrides):
    return limits_of_process(load_config([f"reward.{one}" for one in overrides]).reward)


def test_rewards_of_one_process_with_equal_limits_share_them():
    assert limited("max_concurrent=3", "max_rpm=40") is limited("max_rpm=40", "max_concurrent=3")
    assert limited("max_concurrent=3", "max_rpm=40") is not limited("max_concurrent=4", "max_rpm=40")


def test_tokens_a_minute_are_calls_a_minute_of_the_estimate():
    tokens = limited("max_tpm=10000", "estimated_tokens_per_request=1500", "max_concurrent=9")
    assert tokens is limited("max_rpm=6", "max_concurrent=9")  # 6 x 1,500 fit into 10,000
    assert limited("max_tpm=10000", "max_rpm=3", "max_concurrent=9") is limited("max_rpm=3", "max_concurrent=9")
    with pytest.raises(ConfigError, match=r"max_tpm=1000 is below reward\.estimated_tokens_per_request=2000"):
        limited("max_tpm=1000")
