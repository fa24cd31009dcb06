"""Configuration classes of training engines, at their public import path."""

from verl.workers.config import FSDPEngineConfig, VeOmniEngineConfig
from verl.workers.config import __getattr__ as __getattr__

__all__ = ["FSDPEngineConfig", "VeOmniEngineConfig"]
