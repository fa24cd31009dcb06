"""The engines of strategies `fsdp` and `fsdp2`. On one rank there is nothing to shard and both are the torch engine."""

import os

from verl.utils.errors import ConfigError
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.torch_engine import TorchEngine

STRATEGIES = ["fsdp", "fsdp2"]
DEVICES = ["cpu", "cuda"]


class FSDPEngine(TorchEngine):
    """What both heads share."""

    def initialize(self) -> None:
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if ranks > 1:
            raise ConfigError(
                f"WORLD_SIZE={ranks}: sharding over several ranks is still to come; start one process "
                "(trainer.nnodes=1 trainer.n_gpus_per_node=1)"
            )
        super().initialize()


@EngineRegistry.register(model_type="language_model", backend=STRATEGIES, device=DEVICES)
class FSDPEngineWithLMHead(FSDPEngine):
    """Trains a causal language model."""

    has_value_head = False


@EngineRegistry.register(model_type="value_model", backend=STRATEGIES, device=[*DEVICES, "npu"])
class FSDPEngineWithValueHead(FSDPEngine):
    """Trains a model with one value per token."""

    has_value_head = True


@EngineRegistry.register(model_type="language_model", backend=STRATEGIES, device="npu")
class FSDPNPUEngineWithLMHead(FSDPEngineWithLMHead):
    """Trains a causal language model on an Ascend NPU."""
