"""Further attempts, and a budget of errors."""

import asyncio
import logging

import pytest

from verl.config import load_config
from verl.rewards import call_retries
from verl.rewards.base import RewardInput
from verl.rewards.call_retries import RetriedCalls
from verl.rewards.function_reward import CallRules, FunctionReward
from verl.rewards.here import Here
from verl.rewards.reward_setup import build_reward
from verl.utils.errors import RewardError


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(call_retries, "FIRST_WAIT_S", 0.0)


def score(reward, *answers, source="toy"):
    return asyncio.run(reward.score([RewardInput(source, answer, "7", where="row 1") for answer in answers]))


def failing(times, result=1.0, error=OSError):
    """A function whose first `times` calls for an answer raise, and the number of calls by answer."""
    calls = {}

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        calls[solution_str] = calls.get(solution_str, 0) + 1
        if calls[solution_str] <= times:
            raise error("the service is away")
        return result

    return compute_score, calls


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_raises_is_made_again_and_the_attempts_are_counted(is_async):
    function, calls = failing(2)

    async def as_async(data_source, solution_str, ground_truth, extra_info=None):
        return function(data_source, solution_str, ground_truth)

    reward = FunctionReward(Here(as_async if is_async else function), "f", rules=CallRules(retries=2))
    assert [(one.value, one.retries) for one in score(reward, "a", "b")] == [(1.0, 2), (1.0, 2)]
    assert calls == {"a": 3, "b": 3}


def test_after_the_last_attempt_the_error_is_an_error():
    function, calls = failing(3)
    with pytest.raises(RewardError, match="the service is away"):
        score(FunctionReward(Here(function), "f", rules=CallRules(retries=2)), "a")
    (found,) = score(FunctionReward(Here(failing(9)[0]), "f", rules=CallRules(retries=1, on_error="count")), "a")
    assert found.value is None and found.retries == 1 and "OSError" in found.error and calls == {"a": 3}


def test_a_result_of_a_wrong_type_is_not_tried_again():
    function, calls = failing(0, result="good")
    with pytest.raises(RewardError, match="expected a number"):
        score(FunctionReward(Here(function), "f", rules=CallRules(retries=5)), "a")
    assert calls == {"a": 1}


def test_a_data_source_without_a_scorer_is_not_tried_again():
    made = build_reward(load_config(["reward.retries=3", "reward.on_error=count"]), None)
    (found,) = score(made, "7", source="nobody/knows")
    assert found.retries == 0 and "no reward is known" in found.error


def test_a_call_beyond_its_limit_is_made_again(tmp_path):
    (tmp_path / "mine.py").write_text(
        f"import os, time\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    if not os.path.exists({str(tmp_path / 'called')!r}):\n"
        f"        open({str(tmp_path / 'called')!r}, 'w').close()\n"
        f"        time.sleep(30)\n"
        f"    return 0.5\n"
    )
    path = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    (found,) = score(build_reward(load_config([path, "reward.timeout_s=0.3", "reward.retries=1"]), None), "a")
    assert (found.value, found.retries, found.processes_lost) == (0.5, 1, 1)


def test_waits_double_up_to_a_minute_and_are_the_same_in_each_run(monkeypatch):
    monkeypatch.setattr(call_retries, "FIRST_WAIT_S", 1.0)

    def waits():
        slept = []

        async def sleep(seconds):
            slept.append(seconds)

        function, _ = failing(99)
        kwargs = dict.fromkeys(("data_source", "solution_str", "ground_truth"), "x")
        asyncio.run(RetriedCalls(Here(function), 9, sleep).call([kwargs]))
        return slept

    first = waits()
    longest = [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert first == waits() and all(high / 2 <= w < high for w, high in zip(first, longest, strict=True))
    assert len({round(w / high, 6) for w, high in zip(first, longest, strict=True)}) == 9  # jitter


def test_a_run_ends_after_more_errors_than_its_budget(tmp_path, caplog):
    (tmp_path / "mine.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return 1 / len(solution_str)\n"
    )
    path = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    made = build_reward(load_config([path, "reward.on_error=count", "reward.max_errors=3"]), None)
    with caplog.at_level(logging.ERROR):
        assert [one.value for one in score(made, "", "aa", "")] == [None, 0.5, None]
        assert score(made, "")[0].error
        with pytest.raises(RewardError, match=r"(?s)reward\.max_errors allows.*division by zero.*raise reward\.max"):
            score(made, "a", "")
    unlimited = build_reward(load_config([path, "reward.on_error=count"]), None)
    assert all(one.error for one in score(unlimited, *[""] * 20))
