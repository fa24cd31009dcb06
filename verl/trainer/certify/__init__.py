"""The proof that the gradient of a configuration does not depend on how a mini-batch is cut, packed or shared out."""

from verl.trainer.certify.run import main

__all__ = ["main"]
