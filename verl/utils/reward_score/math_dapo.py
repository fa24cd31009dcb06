"""Import path for outside code to the DAPO scorer of mathematical answers."""

from verl.rewards.scorers.math_dapo import compute_score, extract_answer

__all__ = ["compute_score", "extract_answer"]
