"""Rewards: a score, an abstention or an error that names function and row; no silent zero, no endless wait."""

import asyncio
import logging
import math
import threading
import time

import numpy as np
import pytest
import torch

from verl.rewards.base import RewardInput, Score
from verl.rewards.function_reward import CallRules, FunctionReward
from verl.rewards.here import Here
from verl.rewards.score_reading import read_score
from verl.utils.errors import ConfigError, RewardError

PASSED_AT_CALL = {"data_source", "solution_str", "ground_truth", "extra_info"}


def item(solution="72", number=0, **fields):
    return RewardInput("toy", solution, "72", {"index": number}, where=f"rows.jsonl line {number + 1}", **fields)


def score(reward, *inputs):
    return asyncio.run(reward.score(list(inputs) or [item()]))


def wrap(function, kwargs=None, **rules):
    """The reward of a function object, called in this process."""
    name = "compute_score (mine.py)"
    return FunctionReward(Here(function, name, kwargs, rules.get("num_threads", 8)), name, CallRules(**rules))


# what a function may return


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.bool_(True), 1.0),
        (torch.tensor(2), 2.0),
        (-3, -3.0),
    ],
)
def test_a_number_is_the_score_and_is_stored_as_acc(result, value):
    assert read_score(result) == Score(value=value, extra={"acc": value})


def test_a_dict_gives_its_score_and_its_other_keys_as_columns():
    verdict = read_score({"score": 0.5, "acc": True, "pred": "7"})
    assert verdict == Score(value=0.5, extra={"acc": True, "pred": "7"})


def test_a_function_may_abstain():
    verdict = read_score({"abstain": True, "why": "no tests"})
    assert verdict.abstained and verdict.extra == {"why": "no tests"}


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "1.0",
        [],
        math.nan,
        math.inf,
        {},
        {"acc": 1.0},
        {"score": None},
        {"score": "1"},
        {"score": math.nan},
        1j,
        torch.ones(2),
        np.array([1.0]),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "count"])
def test_anything_else_is_an_error_that_names_function_and_row(bad, on_error):
    reward = wrap(lambda **_: bad, on_error=on_error)
    if on_error == "stop":
        with pytest.raises(RewardError, match=r"compute_score \(mine.py\) failed on rows.jsonl line 5 .*'toy'"):
            score(reward, item(number=4))
    else:
        (verdict,) = score(reward, item(number=4))
        assert verdict.value is None and "compute_score (mine.py): ValueError" in verdict.error


def test_a_message_begins_with_the_users_frame_and_has_the_answer():
    def broken(solution_str, **_):
        return int(solution_str) / 0

    with pytest.raises(RewardError) as error:
        score(wrap(broken), item("7" * 300))
    lines = str(error.value).split("\n")
    assert lines[0].endswith("(data_source 'toy'):") and f'File "{__file__}"' in lines[1] and "/ 0" in lines[2]
    assert f"The answer was '{'7' * 200}'... (300 characters)" in lines
    with pytest.raises(RewardError, match=r"\(data_source 'toy'\): ValueError: the dict's 'score' must .*, not list: "):
        score(wrap(lambda **_: {"score": [1.0]}))


# calling it


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_function_gets_the_rows_fields_and_reward_kwargs_win(kind):
    seen = []

    def record(**kwargs):
        seen.append(kwargs)
        return len(seen)

    async def record_async(**kwargs):
        await asyncio.sleep(0)
        return record(**kwargs)

    reward = wrap(record if kind == "sync" else record_async, kwargs={"ground_truth": "mine", "bonus": 3})
    score(reward, item("answer", number=2, num_turns=4))
    assert seen[0].keys() == PASSED_AT_CALL | {"bonus"}
    assert (seen[0]["solution_str"], seen[0]["ground_truth"], seen[0]["bonus"]) == ("answer", "mine", 3)
    assert seen[0]["extra_info"] == {"index": 2, "num_turns": 4, "rollout_reward_scores": {}}


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_scores_come_in_the_order_of_the_inputs(kind):
    def delay(solution_str):
        return 0.02 if int(solution_str) % 3 == 0 else 0.0

    def sync(data_source, solution_str, ground_truth, extra_info):
        time.sleep(delay(solution_str))
        return int(solution_str)

    async def coroutine(data_source, solution_str, ground_truth, extra_info):
        await asyncio.sleep(delay(solution_str))
        return int(solution_str)

    reward = wrap(sync if kind == "sync" else coroutine)
    for _ in range(2):  # a second event loop, the same reward
        assert [s.value for s in score(reward, *(item(str(i)) for i in range(30)))] == list(range(30))


def test_sync_functions_run_side_by_side_but_no_more_than_num_workers():
    running, most, lock, three = 0, 0, threading.Lock(), threading.Barrier(3)

    def function(**_):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        three.wait(30)  # breaks where no three run at once
        with lock:
            running -= 1
        return 1

    score(wrap(function, num_threads=3), *(item() for _ in range(12)))
    assert most == 3


def test_the_event_loop_of_the_caller_stays_free_while_a_sync_function_works():
    ticked = threading.Event()

    async def both():
        reward = wrap(lambda **_: float(ticked.wait(30)))
        task = asyncio.create_task(reward.score([item()]))
        for _ in range(3):
            await asyncio.sleep(0.01)
        ticked.set()
        return await task

    assert asyncio.run(both())[0].value == 1.0  # 0, where the loop waits for the function


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_slow_rewards_leave_the_callers_thread_pool_free(kind):
    """The default executor has a few threads: an engine that steps in it must not wait for rewards."""

    free = threading.Event()

    async def slow_async(**_):
        while not free.is_set():
            await asyncio.sleep(0.01)
        return 1.0

    async def engine_step():
        reward = wrap(slow_async if kind == "async" else lambda **_: free.wait(60) or 1.0, num_threads=2)
        tasks = [asyncio.create_task(reward.score([item()])) for _ in range(64)]
        await asyncio.sleep(0.05)
        try:
            await asyncio.wait_for(asyncio.to_thread(time.sleep, 0), 30)  # they take all threads until the end
        finally:
            free.set()
        await asyncio.gather(*tasks)

    asyncio.run(engine_step())


def test_answers_nobody_waits_for_any_more_are_not_scored():
    scored, begun, cancelled = [], threading.Event(), threading.Event()

    def function(solution_str, **_):
        scored.append(solution_str)
        begun.set()
        return float(cancelled.wait(60))

    async def cancel_early():
        reward = wrap(function, num_threads=1)
        task = asyncio.create_task(reward.score([item(str(i)) for i in range(20)]))
        await asyncio.to_thread(begun.wait, 60)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        cancelled.set()
        return await reward.score([item("next")])

    assert asyncio.run(cancel_early())[0].value == 1.0
    assert scored == ["0", "next"]


# failing


def broken(**_):
    return 1 / 0


async def broken_async(**_):
    raise KeyError("no such thing")


async def cancels_itself(**_):
    raise asyncio.CancelledError


def leaves(**_):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (broken, "ZeroDivisionError"),
        (broken_async, "KeyError"),
        (cancels_itself, "CancelledError"),
        (leaves, "SystemExit"),
    ],
)
def test_a_failing_function_stops_the_run_or_is_counted_as_configured(function, name):
    with pytest.raises(RewardError) as error:
        score(wrap(function))
    for part in (
        name,
        "compute_score (mine.py)",
        "rows.jsonl line 1",
        f"in {function.__name__}",
        "reward.on_error=count",
    ):
        assert part in str(error.value)
    scores = score(wrap(function, on_error="count"))
    assert scores[0].value is None and name in scores[0].error


def test_counted_errors_leave_no_value_and_one_of_a_kind_is_in_the_log(caplog):
    def odd_fails(solution_str, **_):
        return 1 / (int(solution_str) % 2)

    with caplog.at_level(logging.WARNING):
        scores = score(wrap(odd_fails, on_error="count"), *(item(str(i), i) for i in range(6)))
    assert [s.value for s in scores] == [None, 1.0] * 3
    warnings = [r.getMessage() for r in caplog.records if "division by zero" in r.getMessage()]
    assert len(warnings) == 1 and "rows.jsonl line 1" in warnings[0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda solution: 1, "cannot be called with the keywords data_source, solution_str, ground_truth, extra_info"),
        (lambda data_source, solution_str, ground_truth: 1, "unexpected keyword argument 'extra_info'"),
        (lambda bonus_of_mine, **kwargs: 1, "missing a required argument: 'bonus_of_mine'"),
    ],
)
def test_a_function_with_the_wrong_parameters_is_refused_before_the_run(function, message):
    with pytest.raises(ConfigError, match=message):
        wrap(function)


@pytest.mark.parametrize(("key", "value"), [("on_error", "ignore"), ("timeout_s", 0.0)])
def test_settings_out_of_range_are_refused(key, value):
    with pytest.raises(ConfigError, match=rf"reward\.{key}="):
        wrap(broken, **{key: value})
