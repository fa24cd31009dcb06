"""Import path of the outside world for the GSM8K scorer."""

from verl.rewards.scorers.gsm8k import compute_score, extract_answer

__all__ = ["compute_score", "extract_answer"]
