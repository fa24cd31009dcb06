"""Import path for outside code to the MATH scorer, and to the four functions that published code takes from it."""

from verl.doors.reward_score import is_equiv, last_boxed_only_string, remove_boxed, strip_string
from verl.rewards.scorers.math_reward import compute_score
