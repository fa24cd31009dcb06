"""Configuration classes of the rollout, at their public import path."""

from verl.workers.config import (
    AgentLoopConfig,
    CheckpointEngineConfig,
    MultiTurnConfig,
    RolloutConfig,
    SamplingConfig,
    ServerConfig,
)
from verl.workers.config import __getattr__ as __getattr__

__all__ = [
    "AgentLoopConfig",
    "CheckpointEngineConfig",
    "MultiTurnConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
]
