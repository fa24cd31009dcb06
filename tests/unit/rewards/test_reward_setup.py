"""Which reward scores: a function of the user's, a built-in scorer by data source, and the managers around them."""

import asyncio

import pytest

from verl.config import CustomRewardConfig, DataConfig, RewardConfig, RewardManagerConfig, RunConfig
from verl.rewards.base import RewardInput, Score
from verl.rewards.reward_setup import build_reward
from verl.utils.errors import ConfigError, RewardError


def item(solution="72", number=0, **fields):
    return RewardInput("toy", solution, "72", {"index": number}, where=f"rows.jsonl line {number + 1}", **fields)


def score(reward, *inputs):
    return asyncio.run(reward.score(list(inputs) or [item()]))


def run_config(**reward):
    return RunConfig(reward=RewardConfig(**reward), data=DataConfig(max_response_length=20))


def custom(path, name="compute_score", **kwargs):
    return CustomRewardConfig(path=str(path), name=name, reward_kwargs=kwargs)


FUNCTION = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):\n    return scale * 2\n"
)


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_the_custom_function_of_a_file_is_called_with_its_kwargs(tmp_path, form):
    (tmp_path / "mine.py").write_text(FUNCTION)
    config = run_config(custom_reward_function=custom(form.format(tmp_path / "mine.py"), scale=5))
    assert score(build_reward(config, None))[0].value == 10.0


@pytest.mark.parametrize("path", ["pkg://mine_pkg.inner", "pkg://mine_pkg/inner", "pkg://mine_pkg/inner.py"])
def test_the_custom_function_of_a_module_is_found(tmp_path, monkeypatch, path):
    (tmp_path / "mine_pkg").mkdir()
    (tmp_path / "mine_pkg" / "inner.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    assert score(build_reward(run_config(custom_reward_function=custom(path)), None))[0].value == 2.0


def test_a_file_runs_once_in_the_process_of_each_reward(tmp_path):
    (tmp_path / "once.py").write_text(f"print('loaded', file=open({str(tmp_path / 'log')!r}, 'a'))\n" + FUNCTION)
    config = run_config(custom_reward_function=custom(tmp_path / "once.py"))
    assert [score(build_reward(config, None))[0].value for _ in range(2)] == [2.0, 2.0]
    assert (tmp_path / "log").read_text() == "loaded\n" * 2


@pytest.mark.parametrize(
    ("source", "path", "name", "message"),
    [
        (FUNCTION, "mien.py", "compute_score", "there is no file .*mien.py; did you mean 'mine.py'"),
        (FUNCTION, "mine.py", "compute_scor", "name='compute_scor' is not defined in .*did you mean 'compute_score'"),
        (
            "import nothing_like_this\n",
            "mine.py",
            "compute_score",
            "(?s)running .*mine.py failed:.*line 1.*ModuleNotFound",
        ),
        ("def compute_score(:\n", "mine.py", "compute_score", "(?s)running .*failed:.*SyntaxError"),
        ("compute_score = 7\n", "mine.py", "compute_score", "is int, expected a function"),
    ],
)
def test_a_custom_function_that_cannot_be_loaded_says_why(tmp_path, source, path, name, message):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        build_reward(run_config(custom_reward_function=custom(tmp_path / path, name)), None)


def test_without_a_custom_function_the_data_source_selects_the_scorer():
    reward = build_reward(run_config(), None)
    (verdict,) = score(reward, RewardInput("openai/gsm8k", "so #### 72", "72"))
    assert verdict == Score(value=1.0, extra={"acc": 1.0, "pred": "72"})
    with pytest.raises(RewardError, match="no reward is known for data_source 'toy'") as caught:
        score(reward)
    assert "Traceback" not in str(caught.value)


def test_reward_kwargs_reach_the_built_in_scorer():
    reward = build_reward(run_config(reward_kwargs={"method": "flexible"}), None)
    assert score(reward, RewardInput("openai/gsm8k", "it is 72.", "72"))[0].value == 1.0


# managers


def dapo(**buffer):
    kwargs = {"overlong_buffer_cfg": {"enable": True, "len": 8, "penalty_factor": 0.5, "log": True, **buffer}}
    config = run_config(reward_manager=RewardManagerConfig(name="dapo"), reward_kwargs=kwargs)
    return build_reward(config, None)


@pytest.mark.parametrize(("length", "penalty"), [(1, 0.0), (12, 0.0), (14, -0.125), (16, -0.25), (20, -0.5)])
def test_dapo_punishes_answers_that_run_into_the_buffer(length, penalty):
    right = RewardInput("openai/gsm8k", "#### 72", "72", response_length=length)
    (verdict,) = score(dapo(), right)  # max_resp_len is data.max_response_length=20, the buffer 8 tokens
    assert verdict.value == pytest.approx(1.0 + penalty)
    assert verdict.extra == {"acc": 1.0, "pred": "72", "overlong_reward": penalty, "overlong": penalty < 0}


def test_dapo_leaves_errors_and_disabled_penalties_alone():
    right = RewardInput("openai/gsm8k", "#### 72", "72", response_length=20)
    assert score(dapo(enable=False), right)[0].value == 1.0


@pytest.mark.parametrize(
    ("buffer", "message"),
    [({"len": 21}, "len=21 must be between 1 and"), ({"len": 0}, "len=0"), ({"size": 3}, r"overlong_buffer_cfg\.size")],
)
def test_impossible_penalties_are_refused(buffer, message):
    with pytest.raises(ConfigError, match=message):
        dapo(**buffer)


def test_an_unknown_manager_lists_the_closest():
    with pytest.raises(ConfigError, match="did you mean 'naive'"):
        build_reward(run_config(reward_manager=RewardManagerConfig(name="naif")), None)
