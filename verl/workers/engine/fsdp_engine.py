"""The engines of strategies `fsdp` and `fsdp2`. On one rank there is nothing to shard and both are the torch engine."""

from verl.utils.errors import ConfigError
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.flat import FlatWeights
from verl.workers.engine.sharding import ShardedWeights
from verl.workers.engine.torch_engine import TorchEngine
from verl.workers.engine.weights import Weights

STRATEGIES = ["fsdp", "fsdp2"]
DEVICES = ["cpu", "cuda"]


class FSDPEngine(TorchEngine):
    """What both heads share."""

    def _hold(self) -> Weights:
        if self.engine_config.strategy == "fsdp" and self.engine_config.offload_policy:
            raise ConfigError("offload_policy is FSDP2's; use strategy=fsdp2, or param_offload and optimizer_offload")
        if self.world_size == 1:
            if self.engine_config.offload_policy and self.device.type != "cpu":
                raise ConfigError(
                    "fsdp_config.offload_policy moves the shards of several ranks and this is one; use "
                    "fsdp_config.param_offload and optimizer_offload, or more ranks"
                )
            return super()._hold()
        kind = FlatWeights if self.engine_config.strategy == "fsdp" else ShardedWeights
        return kind(self.model, self.ranks, self.engine_config, self.precision, self.device)


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
