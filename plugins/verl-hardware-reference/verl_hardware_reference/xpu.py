"""Intel GPUs: torch.xpu, which is part of torch itself."""

import os

from verl.plugin.platform import PlatformRegistry, TorchAccelerator


@PlatformRegistry.register(platform="intel")
class PlatformXPU(TorchAccelerator):
    """Collectives through XCCL; Ray counts the device as GPU."""

    @property
    def device_name(self) -> str:
        return "xpu"

    @property
    def vendor_name(self) -> str:
        return "intel"

    @property
    def device_module(self):
        import torch

        return torch.xpu

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        if use_smi_check and self.check_smi_command(["xpu-smi", "discovery"]):
            return True
        return self.is_available()

    def set_allocator_settings(self, settings: str) -> None:
        """torch.xpu's allocator takes no settings at run time."""

    def communication_backend_name(self) -> str:
        return "xccl"

    def visible_devices_envvar(self) -> str:
        return "ONEAPI_DEVICE_SELECTOR"

    def ray_resource_name(self) -> str:
        return "GPU"

    def get_device_uuid(self, device_id: int) -> str:
        """The selector reads "level_zero:0,2": the driver's name comes before the first index."""
        visible = os.environ.get(self.visible_devices_envvar(), "").rpartition(":")[2].split(",")
        return f"GPU-{visible[device_id] if device_id < len(visible) and visible[device_id] else device_id}"
