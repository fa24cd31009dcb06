"""Scoring a file of answers."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section
from verl.config.reward import RewardConfig


@dataclass(frozen=True, kw_only=True)
class EvalDataConfig(Section):
    """The file of answers and its columns."""

    path: str | None = key(None, "Data file with a column of answers (a text or a list of texts per row); required.")
    prompt_key: str = key("prompt", "Column of prompts.")
    answer_key: str | None = key(None, "Column with the ground truth; null is that of reward_model_key.")
    data_source: str | None = key(None, "Data source of rows that name none; null is the file's name.")
    response_key: str = key("responses", "Column of answers.")
    data_source_key: str = key("data_source", "Column that selects the scorer and groups the metrics.")
    reward_model_key: str = key("reward_model", "Column whose `ground_truth` answers are compared with.")


@dataclass(frozen=True, kw_only=True)
class EvalFunctionConfig(Section):
    """A scoring function of your own."""

    path: str | None = key(None, "Python file or pkg://module; null is the built-in scorer of each data_source.")
    name: str = key("compute_score", "Function in it.")


@dataclass(frozen=True, kw_only=True)
class EvalConfig(Section):
    """Configuration of `python3 -m verl.trainer.main_eval`."""

    data: EvalDataConfig = section(EvalDataConfig)
    custom_reward_function: EvalFunctionConfig = section(EvalFunctionConfig)
    reward: RewardConfig = section(RewardConfig)
    ray_kwargs: dict[str, Any] = key({}, "Without effect: scoring needs no cluster.")
