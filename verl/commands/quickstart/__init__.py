"""The proof that everything works: a small model learns arithmetic by GRPO on this very machine."""

from verl.commands.quickstart.stages import main

__all__ = ["main"]
