"""The typed configuration: one frozen dataclass per section. Importing it needs neither torch nor transformers."""

from verl.config.actor import ActorConfig, FSDPActorConfig, PolicyLossConfig, RefConfig, RouterReplayConfig
from verl.config.algorithm import AlgorithmConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig
from verl.config.base import Section
from verl.config.checkpoint import CheckpointConfig
from verl.config.critic import CriticConfig, FSDPCriticConfig
from verl.config.data import CustomClassConfig, DataConfig, SFTDataConfig
from verl.config.distillation import DistillationConfig, DistillationLossConfig
from verl.config.engine import FSDPEngineConfig, VeOmniEngineConfig, WrapPolicyConfig
from verl.config.load import ConfigWarning, load_config
from verl.config.model import FusedKernelConfig, HFModelConfig
from verl.config.optim import FSDPOptimizerConfig
from verl.config.preference import DPOConfig, PreferenceConfig, PreferenceLossConfig, RewardModelConfig
from verl.config.profiler import GlobalProfilerConfig, ProfilerConfig
from verl.config.reward import CustomRewardConfig, RewardConfig, RewardManagerConfig, SandboxFusionConfig
from verl.config.rollout import (
    AgentLoopConfig,
    CheckpointEngineConfig,
    EngineKwargsConfig,
    MultiTurnConfig,
    RolloutConfig,
    SamplingConfig,
    ServerConfig,
)
from verl.config.run_config import ActorRolloutRefConfig, RayKwargsConfig, RunConfig
from verl.config.sft import SFTConfig
from verl.config.trainer import SFTTrainerConfig, TrainerConfig
from verl.utils.errors import ConfigError

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentLoopConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CheckpointEngineConfig",
    "ConfigError",
    "ConfigWarning",
    "CriticConfig",
    "CustomClassConfig",
    "CustomRewardConfig",
    "DPOConfig",
    "DataConfig",
    "DistillationConfig",
    "DistillationLossConfig",
    "EngineKwargsConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "FilterGroupsConfig",
    "FusedKernelConfig",
    "GlobalProfilerConfig",
    "HFModelConfig",
    "KLControlConfig",
    "MultiTurnConfig",
    "PolicyLossConfig",
    "PreferenceConfig",
    "PreferenceLossConfig",
    "ProfilerConfig",
    "RayKwargsConfig",
    "RefConfig",
    "RewardConfig",
    "RewardManagerConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RouterReplayConfig",
    "RunConfig",
    "SFTConfig",
    "SFTDataConfig",
    "SFTTrainerConfig",
    "SamplingConfig",
    "SandboxFusionConfig",
    "Section",
    "ServerConfig",
    "TrainerConfig",
    "VeOmniEngineConfig",
    "WrapPolicyConfig",
    "load_config",
]
