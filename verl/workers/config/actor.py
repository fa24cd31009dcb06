"""Configuration classes of the actor, at their public import path."""

from verl.workers.config import ActorConfig, FSDPActorConfig, PolicyLossConfig, RouterReplayConfig
from verl.workers.config import __getattr__ as __getattr__

__all__ = ["ActorConfig", "FSDPActorConfig", "PolicyLossConfig", "RouterReplayConfig"]
