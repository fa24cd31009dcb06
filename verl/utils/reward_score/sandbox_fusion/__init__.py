"""Import path for outside code to the scorer of programs, which has them run by a SandboxFusion server."""

from verl.rewards.scorers.code_cases import score_on_server as compute_score
