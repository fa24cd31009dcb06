"""Checks that a configuration's gradient does not depend on how a mini-batch is split, packed or sharded."""

from verl.commands.certify.command import main

__all__ = ["main"]
