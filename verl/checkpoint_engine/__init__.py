"""Stable import path for weight transports from outside this library (see `base`)."""

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, TensorMeta

__all__ = ["CheckpointEngine", "CheckpointEngineRegistry", "TensorMeta"]
