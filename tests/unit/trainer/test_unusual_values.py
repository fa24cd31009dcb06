"""A value that is seldom meant is told before the first step, and a usual one is not."""

import re

import pytest

from verl.checks.config import unusual_value_lines
from verl.config import load_config

ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([f"{ACTOR}.optim.lr=0.1"], rf"{ACTOR}\.optim\.lr=0\.1 is above 0\.01"),
        (["critic.optim.lr=1"], r"critic\.optim\.lr=1 is above 0\.01"),
        ([f"{ACTOR}.clip_ratio=1"], rf"{ACTOR}\.clip_ratio=1 clips next to nothing"),
        ([f"{ACTOR}.clip_ratio_high=2.5"], rf"{ACTOR}\.clip_ratio_high=2\.5 clips next to nothing"),
        (
            ["data.train_batch_size=10", f"{ACTOR}.ppo_mini_batch_size=4", "critic.ppo_mini_batch_size=5"],
            rf"{ACTOR}\.ppo_mini_batch_size=4 does not divide data\.train_batch_size=10: .* has 2 prompts",
        ),
        (
            ["algorithm.kl_ctrl.kl_coef=0.2"],
            r"algorithm\.kl_ctrl\.kl_coef=0\.2 has no effect: .*use_kl_in_reward=True",
        ),
    ],
)
def test_a_value_that_is_seldom_meant_is_told(overrides: list[str], line: str):
    (said,) = unusual_value_lines(load_config(overrides))
    assert re.match(f"warning: {line}", said)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [
            f"{ACTOR}.optim.lr=1e-2",
            f"{ACTOR}.clip_ratio=0.9",
            "data.train_batch_size=8",
            f"{ACTOR}.ppo_mini_batch_size=4",
        ],
        ["algorithm.adv_estimator=grpo", "critic.optim.lr=1"],
        ["algorithm.kl_ctrl.kl_coef=0.2", "algorithm.use_kl_in_reward=True"],
        ["algorithm.kl_ctrl.kl_coef=0"],
    ],
)
def test_a_usual_value_is_not(overrides: list[str]):
    assert unusual_value_lines(load_config(overrides)) == []


def test_fine_tuning_is_told_too():
    (said,) = unusual_value_lines(load_config(["optim.lr=0.5"], "sft_trainer"))
    assert said.startswith("warning: optim.lr=0.5 is above 0.01")
