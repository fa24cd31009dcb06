"""The Megatron engine's name, so that plug-ins deriving from it import; the engine itself is still to come."""

from typing import Any

from verl.utils.errors import ConfigError
from verl.workers.engine.torch_engine import TorchEngine


class MegatronEngineWithLMHead(TorchEngine):
    """Importable and derivable; constructing one says what to use instead."""

    def __init__(self, *args: Any):
        raise ConfigError("the megatron engine is still to come; use actor_rollout_ref.actor.strategy=fsdp2")
