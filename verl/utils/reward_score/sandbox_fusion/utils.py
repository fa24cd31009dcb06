"""Import path for outside code to the results of a program test by test, on a SandboxFusion server."""

from verl.rewards.scorers.code_cases import check_correctness
