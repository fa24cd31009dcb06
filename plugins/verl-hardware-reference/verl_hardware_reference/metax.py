"""MetaX GPUs: the vendor's torch calls them "cuda"; only the vendor's program distinguishes them from NVIDIA's."""

from verl.plugin.platform import PlatformRegistry, TorchAccelerator


@PlatformRegistry.register(platform="metax")
class PlatformMetaX(TorchAccelerator):
    """A CUDA-compatible device."""

    @property
    def device_name(self) -> str:
        return "cuda"

    @property
    def vendor_name(self) -> str:
        return "metax"

    @property
    def device_module(self):
        import torch

        return torch.cuda

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return self.check_smi_command("mx-smi")

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return self.device_module.get_device_capability(device_index)

    def communication_backend_name(self) -> str:
        return "nccl"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"

    def is_ipc_supported(self) -> bool:
        return True

    def cudart(self):
        return self.device_module.cudart()
