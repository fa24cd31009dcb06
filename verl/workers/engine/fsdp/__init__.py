"""Where published plug-ins look for the FSDP engines."""

from verl.workers.engine.fsdp_engine import (
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
    FSDPNPUEngineWithLMHead,
)

__all__ = ["FSDPEngineWithLMHead", "FSDPEngineWithValueHead", "FSDPNPUEngineWithLMHead"]
