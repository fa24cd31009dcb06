r"""MATH answers: the last `\boxed{...}` of the solution equals the ground truth (docs/rewards/scorers.md)."""

from typing import Any

from verl.rewards.scorers.answer_score import answer_score
from verl.rewards.scorers.math_answer import last_boxed


def score_answer(solution_str: str, ground_truth: str) -> dict[str, Any]:
    """{score: 1 or 0, acc, pred, undecided}; nothing but a box is an answer."""
    return answer_score(last_boxed(solution_str), ground_truth)


def compute_score(solution_str: str, ground_truth: str) -> float:
    """1 for the right answer in a box, else 0."""
    return score_answer(solution_str, ground_truth)["score"]
