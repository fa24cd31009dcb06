"""Import path for outside code to the MATH scorer, for one answer and for a batch."""

from verl.doors.reward_score import compute_score_batched
from verl.rewards.scorers.math_reward import compute_score
