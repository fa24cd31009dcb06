"""Stable path for transports of weights that others write (see `base`)."""

from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry, TensorMeta

__all__ = ["CheckpointEngine", "CheckpointEngineRegistry", "TensorMeta"]
