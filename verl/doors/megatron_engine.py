"""A placeholder for the Megatron engine, so that plug-ins that derive from it can be imported."""

from typing import Any

from verl.utils.errors import ConfigError
from verl.workers.engine.torch_engine import TorchEngine


class MegatronEngineWithLMHead(TorchEngine):
    """Can be imported and derived from; constructing it raises an error that names another strategy."""

    def __init__(self, *args: Any):
        raise ConfigError("the megatron engine is still to come; use actor_rollout_ref.actor.strategy=fsdp2")
