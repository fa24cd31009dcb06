"""Where published plug-ins look for the FSDP engines."""

from verl.workers.engine.fsdp_engine import FSDPEngineWithLMHead, FSDPEngineWithValueHead

__all__ = ["FSDPEngineWithLMHead", "FSDPEngineWithValueHead"]
