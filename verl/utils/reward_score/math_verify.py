"""Import path for outside code: an answer anywhere in the solution, compared by symbols."""

from verl.rewards.scorers.prime_math import score_answer

__all__ = ["compute_score"]


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0) -> float:
    """1 for the right answer, 0 for a wrong one, `timeout_score` where the comparison was killed. It has a limit of its
    own, whatever `timeout` says."""
    del timeout
    verdict = score_answer(model_output, ground_truth)
    return timeout_score if verdict["undecided"] else verdict["score"]
