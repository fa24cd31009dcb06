"""An end-to-end check on this machine: train a small model on arithmetic with GRPO."""

from verl.commands.quickstart.command import main

__all__ = ["main"]
