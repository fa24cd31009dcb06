"""An OpenAI-compatible server over a rollout engine."""

from verl.commands.serve.command import main

__all__ = ["main"]
