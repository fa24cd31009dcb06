"""Import path for outside code to the GSM8K scorer."""

from verl.doors.reward_score import extract_solution
from verl.rewards.scorers.gsm8k import *
