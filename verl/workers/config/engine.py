"""Configuration classes of training engines, at their public import path."""

from verl.workers.config import *
from verl.workers.config import __getattr__ as __getattr__
