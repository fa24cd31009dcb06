"""Import path for outside code: an answer anywhere in the solution, compared by symbols."""

from verl.rewards.scorers.prime_math import score_answer

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: str, timeout_score: float = 0.0) -> float:
    """1 for the right answer, 0 for a wrong one, `timeout_score` where the comparison was killed."""
    verdict = score_answer(solution_str, ground_truth)
    return timeout_score if verdict["undecided"] else verdict["score"]
