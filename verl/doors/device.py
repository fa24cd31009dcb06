"""The device of this process, as published code asks for it; every function asks `get_platform()`."""

import logging
from typing import Any

from verl.plugin.platform import get_platform

logger = logging.getLogger(__name__)


def get_device_name() -> str:
    """The torch device type of this process."""
    return get_platform().device_name


def get_vendor() -> str:
    """The vendor of the device."""
    return get_platform().vendor_name


def get_torch_device() -> Any:
    """The torch module of the device."""
    return get_platform().device_module


def get_device_id() -> int:
    """Index of the current device."""
    return get_platform().current_device()


def get_nccl_backend() -> str:
    """The torch.distributed backend of the device."""
    return get_platform().communication_backend_name()


def get_resource_name() -> str:
    """Ray's resource name of the device."""
    return get_platform().ray_resource_name()


def get_visible_devices_keyword() -> str:
    """The environment variable that sets the visible devices."""
    return get_platform().visible_devices_envvar()


def set_expandable_segments(enable: bool) -> None:
    """Let the allocator grow its segments, or not."""
    get_platform().set_allocator_settings(f"expandable_segments:{enable}")


def get_device_capability(device_id: int = 0) -> tuple[int | None, int | None]:
    """Compute capability (major, minor)."""
    return get_platform().get_device_capability(device_id)


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    get_platform().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed all devices of the process."""
    get_platform().manual_seed_all(seed)


def is_device_available() -> bool:
    """Whether an accelerator is usable; the CPU does not count."""
    return get_platform().device_name != "cpu" and get_platform().is_available()


def is_support_ipc() -> bool:
    """Whether device tensors can be shared between processes."""
    return get_platform().is_ipc_supported()


def auto_set_device(config: Any) -> None:
    """Write the detected device into `config.trainer.device` of a mutable config; a frozen one resolves it itself."""
    trainer = getattr(config, "trainer", None)
    if trainer is None or getattr(trainer, "device", None) == get_device_name():
        return
    logger.warning("trainer.device=%s is set to the detected %s", getattr(trainer, "device", None), get_device_name())
    trainer.device = get_device_name()


def __getattr__(name: str) -> bool:
    """`is_cuda_available` and `is_npu_available`, evaluated on access."""
    devices = {"is_cuda_available": "cuda", "is_npu_available": "npu"}
    if name not in devices:
        raise AttributeError(f"module 'verl.utils.device' has no attribute {name!r}")
    return get_platform().device_name == devices[name] and get_platform().is_available()
