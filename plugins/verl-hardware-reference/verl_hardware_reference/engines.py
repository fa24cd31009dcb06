"""The FSDP engines of each chip; chip-specific changes follow the parent's `initialize`."""

from torch.distributed.fsdp import FSDPModule

from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

BACKENDS = ["fsdp", "fsdp2"]


def reduce_by_summing(model) -> None:
    """Make FSDP2 reduce gradients by sum and division, for collective libraries without an averaging reduction."""
    if isinstance(model, FSDPModule):
        model.set_force_sum_reduction_for_comms(True)


@EngineRegistry.register(model_type="language_model", backend=BACKENDS, device="xpu", vendor="intel")
class FSDPXPUEngineWithLMHead(FSDPEngineWithLMHead):
    """Causal language models on Intel GPUs; XCCL does not average."""

    def initialize(self):
        super().initialize()
        reduce_by_summing(self.model)


@EngineRegistry.register(model_type="value_model", backend=BACKENDS, device="xpu", vendor="intel")
class FSDPXPUEngineWithValueHead(FSDPEngineWithValueHead):
    """Value models on Intel GPUs."""

    def initialize(self):
        super().initialize()
        reduce_by_summing(self.model)


@EngineRegistry.register(model_type="language_model", backend=BACKENDS, device="mlu", vendor="cambricon")
class FSDPMLUEngineWithLMHead(FSDPEngineWithLMHead):
    """Causal language models on Cambricon MLUs; CNCL does not average."""

    def initialize(self):
        super().initialize()
        reduce_by_summing(self.model)


@EngineRegistry.register(model_type="value_model", backend=BACKENDS, device="mlu", vendor="cambricon")
class FSDPMLUEngineWithValueHead(FSDPEngineWithValueHead):
    """Value models on Cambricon MLUs."""

    def initialize(self):
        super().initialize()
        reduce_by_summing(self.model)


@EngineRegistry.register(model_type="language_model", backend=BACKENDS, device="cuda", vendor="metax")
class FSDPMetaXEngineWithLMHead(FSDPEngineWithLMHead):
    """Causal language models on MetaX GPUs; nothing differs yet."""


@EngineRegistry.register(model_type="value_model", backend=BACKENDS, device="cuda", vendor="metax")
class FSDPMetaXEngineWithValueHead(FSDPEngineWithValueHead):
    """Value models on MetaX GPUs; nothing differs yet."""
