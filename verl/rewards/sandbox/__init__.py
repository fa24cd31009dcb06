"""Runs programs that a model wrote: `run_program(code, stdin, limits) -> ProgramResult`. docs/rewards/sandbox.md."""

from verl.rewards.sandbox.pool import Limits, ProgramResult, Sandbox, SandboxError, run_program, shared_sandbox

__all__ = ["Limits", "ProgramResult", "Sandbox", "SandboxError", "run_program", "shared_sandbox"]
