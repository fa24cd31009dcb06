"""Fixed answers that are scored again: what is kept, what stops a run, what is only a metric."""

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from verl.config import RewardConfig
from verl.config.reward import CustomRewardConfig, RewardManagerConfig
from verl.rewards.base import RewardInput
from verl.rewards.canary import Canary, canary_of, gold_answer, is_storable
from verl.rewards.function_reward import CallRules, FunctionReward
from verl.rewards.here import Here
from verl.rewards.reward_setup import function_reward
from verl.rewards.scorer_lookup import score_row
from verl.utils.errors import RewardError


def answers(count: int = 8) -> list[RewardInput]:
    return [RewardInput("my/own", f"it is {n}", str(n), where=f"row {n}") for n in range(count)]


class Steps:
    """Steps of a run whose reward is `function`."""

    def __init__(self, function: Callable[..., Any], on_error: str = "stop", **settings: Any):
        config = RewardConfig(canary_size=4, **settings)
        self.reward = FunctionReward(Here(function), "mine", rules=CallRules(on_error=on_error, num_threads=1))
        self.canary, self.step = Canary(self.reward, config), 0

    def take(self, inputs: list[RewardInput] | None = None) -> dict[str, float]:
        self.step += 1

        async def work() -> int:
            for item in answers() if inputs is None else inputs:
                await self.canary.score([item])
            return 7

        assert asyncio.run(self.canary.beside(work, self.step)) == 7
        return self.canary.metrics

    def resumed(self) -> "Steps":
        again = Steps(score)
        again.reward, again.canary, again.step = self.reward, Canary(self.reward, self.canary._config), self.step
        again.canary.load_state_dict(json.loads(json.dumps(self.canary.state_dict())))
        return again


def score(data_source, solution_str, ground_truth, extra_info=None):
    return float(ground_truth in solution_str) + len(solution_str) / 1000


def test_a_reward_that_stays_itself_has_no_change():
    steps = Steps(score)
    assert steps.take() == {}  # the answers are chosen in the first step
    for metrics in (steps.take(), steps.take()):
        assert metrics["reward/canary/change/max"] == metrics["reward/canary/failed"] == 0.0
    kept = steps.canary.state_dict()["answers"]
    assert len(kept) == 4 and [item["solution_str"] for item in kept[2:]] == ["it is 0", "it is 1"]
    assert all(r"\boxed{" in item["solution_str"] for item in kept[:2])  # gold answers


def test_a_step_of_several_parts_scores_the_fixed_answers_once():
    calls = []
    steps = Steps(lambda solution_str, **_: calls.append(solution_str) or len(solution_str))
    for expected in ([8 + 2 * 4, 8, 8], [8 + 4, 8, 8]):  # the first step scores them twice
        found, metrics = [], []
        for part in range(3):
            calls.clear()
            steps.step -= part > 0
            metrics.append(dict(steps.take()))
            found.append(len(calls))
        assert found == expected and metrics[0] == metrics[1] == metrics[2]


def test_a_score_that_changes_stops_the_run_with_row_scores_answer_and_causes():
    offset = [0.0]
    steps = Steps(lambda solution_str, **_: len(solution_str) + offset[0] * (solution_str == "it is 1"))
    steps.take()
    steps.take()
    offset[0] = 0.5
    with pytest.raises(RewardError) as error:
        steps.take()
    for part in ("step 3", "than at step 1 to 1 of 4", "row 1 (of the canary set): 7 -> 7.5", "'it is 1'", "a global"):
        assert part in str(error.value)


def test_after_a_resume_the_change_is_named_before_anything_is_sampled():
    offset = [0.0]
    steps = Steps(lambda solution_str, **_: len(solution_str) + offset[0])
    steps.take()
    assert steps.resumed().take()["reward/canary/change/max"] == 0.0
    offset[0] = 1.0
    worked: list[int] = []

    async def work() -> None:
        worked.append(1)

    with pytest.raises(RewardError, match=r"changed since the checkpoint[\s\S]*reward.canary_size=0"):
        asyncio.run(steps.resumed().canary.beside(work, 2))
    assert worked == []


def test_other_settings_of_the_reward_begin_a_new_set():
    steps = Steps(score)
    steps.take()
    other = Canary(steps.reward, replace(steps.canary._config, weights={"acc": 2.0}))
    other.load_state_dict(steps.canary.state_dict())
    assert other.state_dict()["answers"] == []


@pytest.mark.parametrize("mode", ["auto", "stop", "drift"])
def test_a_reward_that_varies_is_measured_and_only_stop_makes_it_an_error(mode: str):
    values = iter(range(1, 1000))
    steps = Steps(lambda **_: next(values) / 10, canary_on_change=mode)
    steps.take()
    if mode == "stop":
        with pytest.raises(RewardError):
            steps.take()
        return
    first, metrics = steps.canary.state_dict()["scores"], steps.take()
    now = steps.canary._first[0] + metrics["reward/canary/change/mean"]
    assert metrics["reward/canary/change/max"] == pytest.approx(metrics["reward/canary/change/mean"])
    assert now > first[0] + 0.5


def test_random_numbers_that_calls_draw_are_given_back():
    def draws(**_: Any) -> float:
        return random.random()

    random.seed(5)
    plain = [draws() for _ in range(24)]
    random.seed(5)
    drawn: list[float] = []
    steps = Steps(lambda **_: drawn.append(draws()) or 1.0)
    for _ in range(3):
        before = len(drawn)
        steps.take()
        drawn[before:] = drawn[before:][:8] if before == 0 else drawn[before:][4:]
    assert drawn == plain


def test_gold_answers_that_the_function_cannot_read_are_left_out():
    def strict(solution_str: str, **_: Any) -> float:
        return float(solution_str.removeprefix("it is "))

    steps = Steps(strict)
    steps.take()
    assert [i["solution_str"] for i in steps.canary.state_dict()["answers"]] == [f"it is {n}" for n in range(4)]
    assert steps.take()["reward/canary/failed"] == 0.0


def test_a_fixed_answer_that_fails_later_is_counted_or_stops_as_any_other():
    for on_error in ("count", "stop"):
        broken: list[int] = []
        steps = Steps(lambda solution_str, broken=broken, **_: 1.0 / (1 - len(broken)), on_error)
        steps.take()
        broken.append(1)
        if on_error == "count":
            assert steps.take()["reward/canary/failed"] == 4.0
        else:
            with pytest.raises(RewardError, match="of the canary set"):
                steps.take()


def test_failures_and_answers_that_json_cannot_hold_are_not_chosen():
    items = answers()
    items[0] = replace(items[0], extra_info={"object": object()})
    items[1] = replace(items[1], extra_info={1: "a key that JSON makes a text"})
    items[2] = replace(items[2], extra_info={"large": "x" * (1 << 19)})
    assert [is_storable(item) for item in items[:4]] == [False, False, False, True]
    steps = Steps(lambda solution_str, **_: {"score": 0, "abstain": True} if "3" in solution_str else 1.0)
    steps.take(items)
    texts = [item["solution_str"] for item in steps.canary.state_dict()["answers"]]
    assert texts[2:] == ["it is 4", "it is 5"]


def test_a_failure_of_the_step_is_raised_as_it_is():
    steps = Steps(score)
    steps.take()

    async def work() -> None:
        raise KeyError("engine")

    with pytest.raises(KeyError, match="engine"):
        asyncio.run(steps.canary.beside(work, 2))


def test_the_gold_answer_is_read_by_the_built_in_scorers():
    for source in ("openai/gsm8k", "searchR1_nq"):
        item = gold_answer(RewardInput(source, "", "18" if "gsm" in source else {"target": ["18"]}))
        assert item is not None
        assert score_row(source, item.solution_str, item.ground_truth)["score"] == 1.0


@pytest.mark.parametrize(
    ("settings", "is_on"),
    [
        ({}, True),
        ({"canary_size": 0}, False),
        ({"reward_manager": RewardManagerConfig(name="dapo")}, True),
        ({"reward_manager": RewardManagerConfig(name="rate_limited")}, False),
        ({"reward_manager": RewardManagerConfig(name="rate_limited"), "canary_size": 2}, True),
    ],
)
def test_it_is_on_where_calls_cost_no_money(settings: dict[str, Any], is_on: bool):
    assert (canary_of(RewardConfig(**settings), FunctionReward(Here(score), "mine")) is not None) == is_on


def test_an_async_function_is_not_called_more_often_unless_asked_for(tmp_path):
    (tmp_path / "service.py").write_text(
        "async def ask(data_source, solution_str, ground_truth, **more):\n  return 1\n"
    )
    custom = CustomRewardConfig(path=str(tmp_path / "service.py"), name="ask")
    reward = function_reward(RewardConfig(custom_reward_function=custom))
    assert canary_of(RewardConfig(custom_reward_function=custom), reward) is None
    assert canary_of(RewardConfig(custom_reward_function=custom, canary_size=2), reward) is not None


def test_a_reward_that_fails_for_fixed_answers_alone_is_said_once(caplog):
    broken = []

    def fails_later(data_source, solution_str, ground_truth, extra_info=None):
        if broken and solution_str in broken:
            raise ValueError("no such answer")
        return 1.0

    steps = Steps(fails_later, on_error="count")
    steps.take()
    steps.take()
    assert not caplog.records
    broken.append("it is 0")
    others = answers()[4:]
    for _ in range(3):
        assert steps.take(others)["reward/canary/failed"] == 1.0
    [said] = [r.getMessage() for r in caplog.records if "fixed answers" in r.getMessage()]
    assert "fails for 1 of 4 fixed answers" in said and "row 0" in said and "no such answer" in said


def test_a_reward_that_cannot_read_gold_answers_is_said(caplog):
    def wants_digits(data_source, solution_str, ground_truth, extra_info=None):
        if not solution_str.startswith("it is"):
            raise ValueError(f"cannot read {solution_str}")
        return 1.0

    Steps(wants_digits).take()
    assert "the reward fails for gold answers" in caplog.records[0].getMessage()
