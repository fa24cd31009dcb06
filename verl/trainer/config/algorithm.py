"""Configuration classes of the algorithm, at their public import path."""

from verl.trainer.config import *
