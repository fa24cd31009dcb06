"""Limits of calls: exact, in order, shared by the process; on an injected clock."""

import asyncio
import os

import pytest

from verl.config import ConfigError, load_config
from verl.rewards.base import RewardInput
from verl.rewards.call_limits import CallLimits, limits_of_process
from verl.rewards.reward_setup import build_reward


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
        await limits.enter()
        starts.append((number, time.now - 1000))
        running += 1
        most = max(most, running)
        await time.sleep(lasts_s)
        running -= 1
        limits.leave()

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
            await limits.enter()
            order.append(name)
            await asyncio.sleep(0)
            limits.leave()

        await limits.enter()
        tasks = {name: asyncio.ensure_future(call(name)) for name in "abcd"}
        await asyncio.sleep(0)
        tasks["b"].cancel()  # while it waits
        limits.leave()
        tasks["a"].cancel()  # after it was given its turn
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        assert order == ["c", "d"]
        async with asyncio.timeout(5):
            await call("last")

    asyncio.run(main())


def test_who_is_cancelled_while_it_waits_for_its_minute_gives_its_turn_back():
    async def main():
        limits = CallLimits(1, 1)
        await limits.enter()
        limits.leave()
        waits = asyncio.ensure_future(limits.enter())  # for a minute
        await asyncio.sleep(0.01)
        waits.cancel()
        await asyncio.wait({waits})
        assert not limits._turns.locked()

    asyncio.run(main())


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


LIMITED = """
import fcntl, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(ground_truth, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0.0  # another call runs
        if solution_str == "begin":
            open(ground_truth + ".begun", "w").close()
        time.sleep(float(extra_info["lasts"]))
        return 1.0
"""


@pytest.mark.parametrize("how", ["timed out", "cancelled"])
def test_a_call_that_was_given_up_keeps_its_turn_until_it_has_ended(tmp_path, how):
    (tmp_path / "mine.py").write_text(LIMITED)
    path = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    limit = f"reward.timeout_s={0.6 if how == 'timed out' else 30}"
    names = ["reward.reward_manager.name=rate_limited", "reward.on_error=count", limit]
    reward, lock = build_reward(load_config([path, *names]), None), str(tmp_path / "lock")

    def item(text, lasts):
        return RewardInput("toy", text, lock, {"lasts": lasts}, where=text)

    async def main():
        lasts = 90 if how == "timed out" else 1
        first = asyncio.create_task(reward.score([item("begin", lasts)]))
        while not os.path.exists(lock + ".begun"):
            await asyncio.sleep(0.01)
        if how == "cancelled":
            first.cancel()
        found = await reward.score([item(f"{n}", 0.05) for n in range(3)])
        await asyncio.gather(first, return_exceptions=True)
        return [one.value for one in found]

    assert asyncio.run(main()) == [1.0] * 3
