"""The Megatron engines, at the import path that published plug-ins use."""

from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

__all__ = ["MegatronEngineWithLMHead"]
