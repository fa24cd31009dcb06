"""Parts of rewards as columns of a batch."""

import math
from collections.abc import Sequence

import torch

from verl.data.batch import Batch
from verl.data.columns import REWARD_PART
from verl.data.trajectory import Trajectory
from verl.utils.errors import RewardError


def with_reward_columns(batch: Batch, trajectories: Sequence[Trajectory], columns: Sequence[str]) -> Batch:
    """The batch of these trajectories with those of `columns` that tell of rewards: reward_parts.NAME (N,), and
    reward_baselines (N,), the reward of a greedy answer to the same prompt."""
    if "reward_baselines" in columns:
        baselines = [float("nan") if t.reward_baseline is None else t.reward_baseline for t in trajectories]
        batch = batch.with_columns(reward_baselines=torch.tensor(baselines))
    names = [column.removeprefix(REWARD_PART) for column in columns if column.startswith(REWARD_PART)]
    for name in names:
        batch = batch.with_columns(**{REWARD_PART + name: torch.tensor([reward_part(t, name) for t in trajectories])})
    return batch


def reward_part(trajectory: Trajectory, name: str) -> float:
    """The finite number called `name` in what the reward function returned; RewardError if there is none.

    `score` is the reward, unless `reward.weights` made it of parts and `score` is one of them.
    """
    part = {"score": trajectory.reward, **trajectory.score_parts}.get(name)
    if isinstance(part, int | float) and math.isfinite(part):
        return float(part)
    there = ", ".join(
        ["score", *(key for key, value in trajectory.score_parts.items() if isinstance(value, int | float))]
    )
    raise RewardError(
        f"the reward of an answer (data_source {trajectory.data_source!r}, row {trajectory.row}) has no finite "
        f"number {name!r}, but {part!r}; it has {there}. Return it from the reward function beside the score, "
        f"{{'score': 1.0, {name!r}: 0.5}}, or ask for parts that every answer has"
    )
