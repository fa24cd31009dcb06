"""Where published plug-ins look for the Megatron engines."""

from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

__all__ = ["MegatronEngineWithLMHead"]
