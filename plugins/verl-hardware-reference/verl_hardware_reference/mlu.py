"""Cambricon MLUs: importing torch_mlu adds torch.mlu."""

import importlib
import importlib.util

from verl.plugin.platform import PlatformRegistry, TorchAccelerator


@PlatformRegistry.register(platform="cambricon")
class PlatformMLU(TorchAccelerator):
    """Collectives through CNCL."""

    @property
    def device_name(self) -> str:
        return "mlu"

    @property
    def vendor_name(self) -> str:
        return "cambricon"

    @property
    def device_module(self):
        import torch

        importlib.import_module("torch_mlu")
        return torch.mlu

    def is_available(self) -> bool:
        return importlib.util.find_spec("torch_mlu") is not None and super().is_available()

    def communication_backend_name(self) -> str:
        return "cncl"

    def visible_devices_envvar(self) -> str:
        return "MLU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "MLU"
