"""The Megatron engine, at the import path that published plug-ins use."""

from verl.doors.megatron_engine import MegatronEngineWithLMHead
