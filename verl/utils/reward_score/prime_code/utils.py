"""Import path for outside code to the results of a program test by test, in the sandbox of this machine."""

from verl.doors.reward_score import check_correctness_here as check_correctness
