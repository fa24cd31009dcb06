"""Rewards: a function of your own or a built-in scorer."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig(Section):
    """A reward function of your own."""

    path: str | None = key(
        None, "Python file, file://... or pkg://module that holds the function; null is built-in scorers."
    )
    name: str = key("compute_score", "Name of the function.")
    reward_kwargs: dict[str, Any] = key({}, "Arguments added to every call.")


@dataclass(frozen=True, kw_only=True)
class RewardManagerConfig(Section):
    """The reward manager, which changes the scorer's value."""

    name: str = key("naive", "Reward manager by name; naive puts the score on the last token.")


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """Scoring of answers."""

    num_workers: int = key(8, "Scorer calls that run concurrently.", minimum=1)
    on_error: str = key(
        "stop", "A failing scorer stops the run, or its answer is left out and counted.", choices=("stop", "count")
    )
    timeout_s: float | None = key(
        300.0, "Seconds one call may take before it counts as failed; null is no limit.", greater_than=0
    )
    weights: dict[str, float] = key(
        {},
        "Weight of each part of the reward by its name: the reward is their weighted sum. Empty: it is the score that "
        "the function returns.",
    )
    reward_kwargs: dict[str, Any] = key({}, "Arguments of the built-in scorer, and of the dapo manager.")
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
