r"""Geometry3K answers: 0.9 for the right answer, 0.1 for the format `<think>...</think> ... \boxed{...}`."""

from typing import Any

from verl.rewards.scorers.answer_score import answer_score
from verl.rewards.scorers.math_answer import last_boxed


def has_format(solution_str: str) -> bool:
    r"""Whether the text begins with `<think>`, closes it, and has a complete box after that."""
    thought, closing, rest = solution_str.strip().partition("</think>")
    return thought.startswith("<think>") and bool(closing) and last_boxed(rest) is not None


def score_answer(
    solution_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1
) -> dict[str, Any]:
    """{score, acc, format, pred, undecided}; `format_score` is the weight of the format, the answer has the rest."""
    answer = last_boxed(solution_str) if use_boxed else solution_str.rpartition("</think>")[2].strip()
    verdict = answer_score(answer, ground_truth)
    form = float(has_format(solution_str))
    return {**verdict, "score": (1 - format_score) * verdict["acc"] + format_score * form, "format": form}


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """The weighted sum of answer and format."""
    return score_answer(predict_str, ground_truth, use_boxed, format_score)["score"]


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """1 for the right answer, else 0."""
    return compute_score(predict_str, ground_truth, use_boxed, format_score=0.0)


def format_reward(predict_str: str) -> float:
    """1 for the format, else 0."""
    return float(has_format(predict_str))
