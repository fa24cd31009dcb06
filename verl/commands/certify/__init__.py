"""The proof that the gradient of a configuration does not depend on how a mini-batch is cut, packed or shared out."""

from verl.commands.certify.comparison import main

__all__ = ["main"]
