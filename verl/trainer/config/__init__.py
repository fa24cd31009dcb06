"""Configuration classes at the path other people's code imports them from; presets (YAML) lie beside this file."""

from verl.config import AlgorithmConfig as AlgoConfig
from verl.config import CheckpointConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgoConfig", "CheckpointConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
