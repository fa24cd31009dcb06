"""Import path for outside code to the MATH scorer, for one answer and for a batch."""

from collections.abc import Sequence
from typing import Any

from verl.rewards.scorers.math_reward import compute_score

__all__ = ["compute_score", "compute_score_batched"]


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Any] | None = None,
) -> list[float]:
    """One score per answer; the data sources and extra_infos are not used."""
    del data_sources, extra_infos
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]
