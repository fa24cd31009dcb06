"""Import path for outside code to the DAPO scorer of mathematical answers."""

from verl.doors.reward_score import last_boxed_only_string, remove_boxed
from verl.doors.reward_score import strip_string as normalize_final_answer
from verl.rewards.scorers.math_dapo import *
