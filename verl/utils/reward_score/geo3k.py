"""Import path for outside code to the Geometry3K scorer."""

from verl.rewards.scorers.geo3k import acc_reward, compute_score, format_reward, has_format

__all__ = ["acc_reward", "compute_score", "format_reward", "has_format"]
