"""Import path for outside code to the scorer of Numina answers."""

from verl.rewards.scorers.prime_math import compute_score, extract_answer

__all__ = ["compute_score", "extract_answer"]
