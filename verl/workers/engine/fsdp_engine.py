"""The engines of strategies `fsdp2` and `fsdp`, its older name. On one rank both are the torch engine, unsharded."""

from verl.config.engine import STRATEGIES
from verl.models.load import load_reward_model, load_value_model
from verl.utils.errors import ConfigError
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp2 import FSDP2Parameters
from verl.workers.engine.model_parameters import ModelParameters
from verl.workers.engine.torch_engine import TorchEngine

DEVICES = ["cpu", "cuda"]


class FSDPEngine(TorchEngine):
    """The base of the engines with a language-model head and with a value head."""

    def _build_parameters(self) -> ModelParameters:
        if self.world_size == 1:
            if self.engine_config.offload_policy and self.device.type != "cpu":
                raise ConfigError(
                    "fsdp_config.offload_policy moves the shards of several ranks and this is one; use "
                    "fsdp_config.param_offload and optimizer_offload, or more ranks"
                )
            return super()._build_parameters()
        return FSDP2Parameters(self.model, self.rank_mesh, self.engine_config, self.precision, self.device)


@EngineRegistry.register(model_type="language_model", backend=list(STRATEGIES), device=DEVICES)
class FSDPEngineWithLMHead(FSDPEngine):
    """Trains a causal language model."""

    has_value_head = False


@EngineRegistry.register(model_type="value_model", backend=list(STRATEGIES), device=[*DEVICES, "npu"])
class FSDPEngineWithValueHead(FSDPEngine):
    """Trains a model with one value per token."""

    has_value_head = True
    load_model = staticmethod(load_value_model)


@EngineRegistry.register(model_type="reward_model", backend=list(STRATEGIES), device=[*DEVICES, "npu"])
class FSDPEngineWithRewardHead(FSDPEngineWithValueHead):
    """Trains a model with one score per sequence, in the format of sequence classification."""

    load_model = staticmethod(load_reward_model)


@EngineRegistry.register(model_type="language_model", backend=list(STRATEGIES), device="npu")
class FSDPNPUEngineWithLMHead(FSDPEngineWithLMHead):
    """Trains a causal language model on an Ascend NPU."""
