"""Import path for outside code to the scorer of programs, which runs them in the sandbox of this machine."""

from verl.rewards.scorers.code_cases import score_here as compute_score
