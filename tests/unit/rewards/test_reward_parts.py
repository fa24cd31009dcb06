"""Rewards of several parts: their weighted sum is the reward, and each keeps its name."""

import asyncio

import numpy as np
import pytest
import torch

from verl.config import ConfigError, load_config
from verl.rewards.base import RewardInput, Score
from verl.rewards.reward_setup import build_reward
from verl.rewards.score_reading import read_score
from verl.utils.errors import RewardError

WEIGHTS = {"acc": 1.0, "format": 0.25}

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    thought, _, answer = solution_str.rpartition("</think>")
    return {
        "acc": answer.strip() == ground_truth,
        "format": float(thought.startswith("<think>")),
        "brevity": 1 / (1 + len(answer)),
        "pred": answer.strip(),
    }
"""


def reward(tmp_path, *overrides, function=FUNCTION):
    (tmp_path / "mine.py").write_text(function)
    config = load_config([f"reward.custom_reward_function.path={tmp_path / 'mine.py'}", *overrides])
    return build_reward(config, None)


def score(made, *answers):
    inputs = [RewardInput("x", answer, "7", {}, where=f"rows.jsonl line {i + 1}") for i, answer in enumerate(answers)]
    return asyncio.run(made.score(inputs))


def test_a_function_of_parts_is_weighed_by_name(tmp_path):
    made = reward(tmp_path, "reward.weights.acc=1", "reward.weights.format=0.25", "reward.weights.brevity=-2")
    right, unformed = score(made, "<think>x</think>7", "the answer is 7")
    assert right.value == pytest.approx(1 + 0.25 - 2 / 2) and unformed.value == pytest.approx(-2 / 16)
    assert right.extra == {"acc": True, "format": 1.0, "brevity": 0.5, "pred": "7"}


def test_the_keys_of_gdpo_weigh_the_same_parts(tmp_path):
    ours = reward(tmp_path, "reward.weights.acc=1", "reward.weights.format=0.25")
    for overrides in (
        ["algorithm.gdpo_reward_keys=[acc,format]", "algorithm.gdpo_reward_weights=[1,0.25]"],
        ["algorithm.gdpo_reward_keys=[acc,format]", "reward.weights.acc=1", "reward.weights.format=0.25"],
    ):
        assert score(reward(tmp_path, *overrides), "<think>7</think>7") == score(ours, "<think>7</think>7")
    alone = reward(tmp_path, "algorithm.gdpo_reward_keys=[acc,format]")
    assert score(alone, "<think>7</think>7")[0].value == 2.0


def test_each_spelling_fills_the_other():
    ours = load_config(["reward.weights.b=2", "reward.weights.a=0.5"])
    theirs = load_config(["algorithm.gdpo_reward_keys=[b,a]", "algorithm.gdpo_reward_weights=[2,0.5]"])
    for config in (ours, theirs):
        assert config.reward.weights == {"b": 2.0, "a": 0.5}
        assert (config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights) == (["b", "a"], [2.0, 0.5])
    assert load_config([]).reward.weights == {} and load_config([]).algorithm.gdpo_reward_keys is None


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"acc": 1.0}, "it returned no 'format', which reward.weights.format weighs \\(it has 'acc'\\)"),
        ({"acc": 1.0, "format": float("nan")}, "the part 'format' of the reward is nan; it must be finite"),
        ({"acc": float("-inf"), "format": 1}, "the part 'acc' of the reward is -inf; it must be finite"),
        ({"acc": "yes", "format": 1}, "the part 'acc' of the reward must be a number, not str: 'yes'"),
        ({"acc": None, "format": 1}, "the part 'acc' of the reward must be a number, not NoneType"),
        (0.5, "it returned no 'acc'"),
    ],
)
def test_a_part_that_is_missing_or_no_number_names_function_part_and_row(tmp_path, result, message):
    with pytest.raises(ValueError, match=message):
        read_score(result, WEIGHTS)
    weights = ("reward.weights.acc=1", "reward.weights.format=0.25")
    source = f"nan, inf = float('nan'), float('inf')\ndef compute_score(**_):\n    return {result!r}\n"
    with pytest.raises(RewardError, match=rf"compute_score \(.*mine.py\) failed on rows.jsonl line 1 .*{message}"):
        score(reward(tmp_path, *weights, function=source), "7")
    counted = score(reward(tmp_path, *weights, "reward.on_error=count", function=source), "7")
    assert counted[0].value is None and counted[0].error


@pytest.mark.parametrize("make", [float, np.float32, np.float64, torch.tensor, int, bool, np.bool_])
def test_parts_are_numbers_of_any_library(make):
    found = read_score({"acc": make(1), "format": make(0), "more": make(1)}, WEIGHTS)
    assert found == Score(1.0, {"acc": 1, "format": 0, "more": 1})
    assert all(type(value) in (int, float, bool) for value in found.extra.values())


def test_the_functions_own_score_may_be_a_part_or_a_column():
    assert read_score({"score": 3.0, "acc": 1, "format": 0}, WEIGHTS) == Score(
        1.0, {"score": 3.0, "acc": 1, "format": 0}
    )
    assert read_score(0.5, {"score": 2.0}) == Score(1.0, {"acc": 0.5})
    assert read_score({"abstain": True, "acc": 1}, WEIGHTS) == Score(None, {"acc": 1})


def test_the_gdpo_manager_asks_for_named_parts(tmp_path):
    manager = "reward.reward_manager.name=gdpo"
    with pytest.raises(ConfigError, match=r"needs the parts of the reward: reward\.weights\.NAME=WEIGHT"):
        reward(tmp_path, manager)
    made = reward(tmp_path, manager, "algorithm.gdpo_reward_keys=[acc]")
    assert score(made, "7")[0].value == 1.0


def test_the_over_long_penalty_comes_after_the_weights(tmp_path):
    made = reward(
        tmp_path,
        "reward.weights.acc=4",
        "reward.reward_manager.name=dapo",
        "+reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 8, penalty_factor: 1}",
        "+reward.reward_kwargs.max_resp_len=16",
    )
    found = asyncio.run(made.score([RewardInput("x", "7", "7", response_length=12)]))[0]
    assert found.value == 4 - 0.5 and found.extra["acc"] is True
