"""A vendor's plug-in for a device nobody has heard of; the library it loads is built by the test (TOASTER_LIBRARY)."""

import os
import types

import torch

from verl.plugin.platform import PlatformRegistry, TorchAccelerator
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import FSDPEngineWithLMHead
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithValueHead

torch.ops.load_library(os.environ["TOASTER_LIBRARY"])

module = types.ModuleType("torch.toaster")
module.is_available = lambda: True
module.is_initialized = lambda: True
module.device_count = lambda: 1
module.current_device = lambda: 0
module.set_device = lambda index: None
module.synchronize = lambda index=None: None
module.empty_cache = lambda: None
module.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
module.manual_seed_all = module.manual_seed
module.get_rng_state = lambda device=None: torch.get_rng_state()
module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
module.mem_get_info = lambda: (1 << 30, 1 << 30)
module._is_in_bad_fork = lambda: False

torch.utils.rename_privateuse1_backend("toaster")
torch._register_device_module("toaster", module)
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


@PlatformRegistry.register(platform="acme")
class PlatformToaster(TorchAccelerator):
    """Detected always; nothing about it is called cuda."""

    device_name, vendor_name, device_module = "toaster", "acme", module

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "TOASTER_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "TOASTER"


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="toaster", vendor="acme")
class FSDPToasterEngineWithLMHead(FSDPEngineWithLMHead):
    """Nothing to change: the library runs on the device as it is."""

    def initialize(self):
        super().initialize()
        devices = {parameter.device for parameter in self.model.parameters()}
        assert devices == {torch.device("toaster", 0)}, devices
        print("TOASTER engine: every parameter is on", *devices, flush=True)


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="toaster", vendor="acme")
class FSDPToasterEngineWithValueHead(FSDPEngineWithValueHead):
    """Nothing to change here either."""
