"""Configuration classes at the path other people's code imports them from."""

from verl.config import (
    ActorConfig,
    AgentLoopConfig,
    CheckpointEngineConfig,
    CriticConfig,
    FSDPActorConfig,
    FSDPCriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    MultiTurnConfig,
    PolicyLossConfig,
    RewardConfig,
    RolloutConfig,
    RouterReplayConfig,
    SamplingConfig,
    ServerConfig,
    VeOmniEngineConfig,
    WrapPolicyConfig,
)
from verl.utils.import_paths import refuse_missing_names

__all__ = [
    "ActorConfig",
    "AgentLoopConfig",
    "CheckpointEngineConfig",
    "CriticConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "HFModelConfig",
    "MultiTurnConfig",
    "PolicyLossConfig",
    "RewardConfig",
    "RolloutConfig",
    "RouterReplayConfig",
    "SamplingConfig",
    "ServerConfig",
    "VeOmniEngineConfig",
    "WrapPolicyConfig",
]
__getattr__ = refuse_missing_names(__name__)
