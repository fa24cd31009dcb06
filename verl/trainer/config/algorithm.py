"""Configuration classes of the algorithm, at their public import path."""

from verl.trainer.config import AlgoConfig, FilterGroupsConfig, KLControlConfig, RolloutCorrectionConfig

__all__ = ["AlgoConfig", "FilterGroupsConfig", "KLControlConfig", "RolloutCorrectionConfig"]
