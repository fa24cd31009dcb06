"""The manager `batch`: one call with lists for the answers to a prompt."""

import asyncio

import numpy as np
import pytest

from verl.config import ConfigError, load_config
from verl.rewards.base import RewardInput, Score
from verl.rewards.reward_setup import build_reward
from verl.utils.errors import RewardError

FUNCTION = """
calls = []

def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    calls.append((data_sources, solution_strs, ground_truths, [info["index"] for info in extra_infos]))
    {body}
"""


def made(tmp_path, body, *overrides, prefix=""):
    (tmp_path / "mine.py").write_text(FUNCTION.replace("def ", prefix + "def ").format(body=body))
    path = f"reward.custom_reward_function.path={tmp_path / 'mine.py'}"
    return build_reward(load_config([path, "reward.reward_manager.name=batch", *overrides]), None)


def score(reward, *answers):
    inputs = [RewardInput("toy", text, str(i), {"index": i}, where=f"row {i}") for i, text in enumerate(answers)]
    return asyncio.run(reward.score(inputs))


@pytest.mark.parametrize("prefix", ["", "async "])
def test_the_function_is_called_once_with_lists(tmp_path, prefix):
    body = 'return [{"score": len(text) + bonus, "calls": calls} for text in solution_strs]'
    bonus = "+reward.custom_reward_function.reward_kwargs.bonus=10"
    reward = made(tmp_path, body, bonus, prefix=prefix)
    calls = [[["toy"] * 3, ["a", "bb", "ccc"], ["0", "1", "2"], [0, 1, 2]]]
    assert score(reward, "a", "bb", "ccc") == [Score(float(n), {"calls": calls}) for n in (11, 12, 13)]


def test_each_result_may_be_a_dict_and_the_list_an_array(tmp_path):
    body = 'return [{"score": 1, "acc": True}, {"abstain": True}]'
    first, second = score(made(tmp_path, body), "a", "b")
    assert first == Score(1.0, {"acc": True}) and second.abstained
    (tmp_path / "other").mkdir()
    array = made(tmp_path / "other", "import numpy; return numpy.array([0.5, 0.25])")
    assert [one.value for one in score(array, "a", "b")] == [0.5, 0.25]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", "it returned a list with 1 results for 2 answers"),
        ("return 1.0", "it returned a float with 1.0 for 2 answers; return a list"),
        ("return {'a': 1, 'b': 2}", "it returned a dict with 2 results for 2 answers"),
        ("return {1.0, 0.0}", "it returned a str with .* for 2 answers"),
        ("return 'ab'", "it returned a str with 2 results for 2 answers"),
        ("return [1.0, None]", "row 1.*expected a number"),
        ("raise OSError('away')", "OSError: away"),
    ],
)
def test_what_is_no_list_of_scores_is_an_error_of_every_answer(tmp_path, body, message):
    with pytest.raises(RewardError, match=f"(?s){message}"):
        score(made(tmp_path, body), "a", "b")
    (tmp_path / "count").mkdir()
    found = score(made(tmp_path / "count", body, "reward.on_error=count"), "a", "b")
    assert found[1].error and found[1].value is None


def test_the_attempts_of_one_call_are_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr("verl.rewards.call_retries.FIRST_WAIT_S", 0.0)
    reward = made(
        tmp_path, "if len(calls) < 3: raise OSError('away')\n    return [1.0] * len(solution_strs)", "reward.retries=2"
    )
    assert [(one.value, one.retries) for one in score(reward, "a", "b", "c")] == [(1.0, 2), (1.0, 0), (1.0, 0)]


def test_it_needs_a_function_of_its_own_that_takes_lists(tmp_path):
    with pytest.raises(ConfigError, match="batch calls a function of your own with lists"):
        build_reward(load_config(["reward.reward_manager.name=batch"]), None)
    (tmp_path / "one.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1\n"
    )
    overrides = [f"reward.custom_reward_function.path={tmp_path / 'one.py'}", "reward.reward_manager.name=batch"]
    with pytest.raises(ConfigError, match=r"Define it as compute_score\(data_sources, solution_strs"):
        build_reward(load_config(overrides), None)


def test_numbers_of_other_libraries_are_scores(tmp_path):
    body = "import numpy; return [numpy.float32(0.5), numpy.int64(2)]"
    assert [one.value for one in score(made(tmp_path, body), "a", "b")] == [float(np.float32(0.5)), 2.0]
