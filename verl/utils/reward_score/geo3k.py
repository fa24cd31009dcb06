"""Import path for outside code to the Geometry3K scorer."""

from verl.rewards.scorers.geo3k import compute_score, has_format

__all__ = ["compute_score", "has_format"]
