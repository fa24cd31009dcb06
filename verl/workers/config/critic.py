"""Configuration classes of the critic, at their public import path."""

from verl.workers.config import CriticConfig, FSDPCriticConfig
from verl.workers.config import __getattr__ as __getattr__

__all__ = ["CriticConfig", "FSDPCriticConfig"]
