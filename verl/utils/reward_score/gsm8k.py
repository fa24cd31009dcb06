"""Import path for outside code to the GSM8K scorer."""

from verl.rewards.scorers.gsm8k import compute_score, extract_answer

__all__ = ["compute_score", "extract_answer"]
