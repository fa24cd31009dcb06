"""Import path for outside code to the scorer of answers found by search."""

from verl.rewards.scorers.search_r1_like_qa_em import compute_score, normalize_answer

__all__ = ["compute_score", "normalize_answer"]
