"""The platform members that are the same for every device with a torch module."""

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

from verl.plugin.platform.platform_base import PlatformBase


class TorchAccelerator(PlatformBase):
    """A platform whose `device_module` has the usual functions (`is_available`, `set_device`, `manual_seed`, ...).

    The vendor implements: `device_name`, `vendor_name`, `device_module`, `visible_devices_envvar`, `ray_resource_name`,
    `communication_backend_name`.
    """

    def is_available(self) -> bool:
        return bool(self.device_module.is_available())

    def current_device(self) -> int:
        return int(self.device_module.current_device())

    def device_count(self) -> int:
        return int(self.device_module.device_count())

    def set_device(self, device_index: int) -> None:
        self.device_module.set_device(device_index)

    def synchronize(self, device_index: int | None = None) -> None:
        if device_index is None:
            self.device_module.synchronize()
        else:
            self.device_module.synchronize(device_index)

    def manual_seed(self, seed: int) -> None:
        self.device_module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.device_module.manual_seed_all(seed)

    def set_allocator_settings(self, settings: str) -> None:
        self.device_module.memory._set_allocator_settings(settings)

    def empty_cache(self) -> None:
        self.device_module.empty_cache()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def nvtx_range(self, msg: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def profiler_start(self) -> None:
        """Does nothing: the vendor has no profiler to control."""

    def profiler_stop(self) -> None:
        """Does nothing: the vendor has no profiler to control."""

    def ray_noset_envvars(self) -> list[str]:
        return [f"RAY_EXPERIMENTAL_NOSET_{self.visible_devices_envvar()}"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


def flagcx_or(backend: str) -> str:
    """`backend`, unless USE_FLAGCX asks for the FlagCX library."""
    return "flagcx" if os.environ.get("USE_FLAGCX", "").strip().lower() in ("1", "true") else backend
