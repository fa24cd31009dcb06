"""Configuration classes that other sections use, at their public import path."""

from verl.trainer.config import *
