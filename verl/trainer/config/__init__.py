"""Configuration classes at their public import path; the preset YAML files are in this folder."""

from verl.config import AlgorithmConfig as AlgoConfig
from verl.config import CheckpointConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgoConfig", "CheckpointConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
