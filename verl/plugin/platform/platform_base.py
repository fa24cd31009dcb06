"""What hardware is called and what it can do: the interface that every vendor implements."""

import os
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    from verl.plugin.findings import BackendSupport, Finding

_SMI_TIMEOUT_S = 10
_SMI_FOLDERS = ("/usr/bin", "/usr/local/bin", "/usr/local/cuda/bin")


class PlatformBase(ABC):
    """One kind of device. Abstract members are the vendor's to answer; the others have a default that is safe anywhere.

    Constructing one must be cheap and must not touch a device: detection builds several and keeps one.
    """

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The torch device type, such as "cuda"."""

    @property
    @abstractmethod
    def vendor_name(self) -> str:
        """The vendor, which is the second key when an engine is looked up."""

    @property
    @abstractmethod
    def device_module(self) -> "ModuleType | Any":
        """The torch module of the device, such as `torch.cuda`."""

    @abstractmethod
    def is_available(self) -> bool:
        """Whether this process can put tensors on the device."""

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether the host has the device; may be true in a process from which the devices are hidden."""
        return self.is_available()

    @abstractmethod
    def current_device(self) -> int:
        """Index of the device that new tensors go to."""

    @abstractmethod
    def device_count(self) -> int:
        """How many devices this process sees."""

    @abstractmethod
    def set_device(self, device_index: int) -> None:
        """Send new tensors of this process to device `device_index`."""

    @abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has finished what was queued on it."""

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generator of the current device."""

    @abstractmethod
    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices of this process."""

    @abstractmethod
    def set_allocator_settings(self, settings: str) -> None:
        """Configure the caching allocator, for example "expandable_segments:True"."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give cached, unused device memory back."""

    @abstractmethod
    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """(major, minor) of the chip, or (None, None) where the idea does not exist."""

    @abstractmethod
    def communication_backend_name(self) -> str:
        """The torch.distributed backend for tensors on this device."""

    @abstractmethod
    def visible_devices_envvar(self) -> str:
        """The environment variable that hides devices from a process; empty when there is none."""

    @abstractmethod
    def nvtx_range(self, msg: str) -> AbstractContextManager[Any]:
        """A named range in the vendor's profiler, or a context that does nothing."""

    @abstractmethod
    def profiler_start(self) -> None:
        """Tell an attached profiler to begin recording."""

    @abstractmethod
    def profiler_stop(self) -> None:
        """Tell an attached profiler to stop recording."""

    @abstractmethod
    def ray_resource_name(self) -> str:
        """What Ray calls this device, such as "GPU"."""

    @abstractmethod
    def ray_noset_envvars(self) -> list[str]:
        """Variables that stop Ray from rewriting the visible devices."""

    @abstractmethod
    def is_ipc_supported(self) -> bool:
        """Whether two processes can share a device tensor without a copy."""

    @abstractmethod
    def cudart(self) -> Any:
        """The CUDA runtime module, or None."""

    def ray_resource_options(self, num_devices: float) -> dict[str, Any]:
        """Options for a Ray actor that needs `num_devices` devices."""
        name = self.ray_resource_name()
        return {"num_gpus": num_devices} if name == "GPU" else {"resources": {name: num_devices}}

    def rollout_env_vars(self) -> dict[str, str]:
        """Environment of the processes that serve rollouts."""
        return {}

    def get_collective_module(self) -> Any:
        """A module of collectives that work outside a process group (such as `cupy.cuda.nccl`), or None."""
        return None

    def get_device_uuid(self, device_id: int) -> str:
        """A name for a device that two processes with different visible devices agree on."""
        visible = [part.strip() for part in os.environ.get(self.visible_devices_envvar() or "-", "").split(",")]
        known = device_id < len(visible) and visible[device_id] != ""
        return f"{self.ray_resource_name()}-{visible[device_id] if known else device_id}"

    def apply_model_patches(self, model_type: str) -> None:  # noqa: B027
        """Change model code for this device; called before a model of `model_type` is built."""

    def compiles_triton(self) -> bool:
        """Whether Triton kernels, and with them torch.compile's, run on this device."""
        return False

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        free, total = self.device_module.mem_get_info()
        return int(free), int(total)

    def peak_memory(self) -> tuple[int, int]:
        """(allocated, reserved) bytes at their highest since `reset_peak_memory`; zeros where nobody counts."""
        module = self.device_module
        allocated = getattr(module, "max_memory_allocated", None)
        reserved = getattr(module, "max_memory_reserved", None)
        return (int(allocated()) if allocated else 0, int(reserved()) if reserved else 0)

    def reset_peak_memory(self) -> None:
        """Start `peak_memory` afresh."""
        reset = getattr(self.device_module, "reset_peak_memory_stats", None)
        if reset:
            reset()

    def driver_version(self) -> str | None:
        """The installed kernel driver's version, or None where it cannot be told."""
        return None

    def runtime_version(self) -> str | None:
        """The version of the vendor's runtime (CUDA, ROCm, CANN) that torch uses, or None."""
        return None

    def sleep_mode_blocker(self, vllm_version: str | None) -> str | None:
        """Why vLLM of this version cannot hand its memory back between rollouts, or None when it can."""
        return None

    def findings(self) -> "list[Finding]":
        """What `verl doctor` should say about driver, runtime and host for this platform."""
        return []

    def backend_support(self) -> "list[BackendSupport]":
        """The vendor's support table: what is promised on this chip, before looking at the machine at hand."""
        return []

    @staticmethod
    def check_smi_command(cmd: str | Sequence[str]) -> bool:
        """Whether a vendor's monitoring program exists and exits with 0 within ten seconds."""
        return smi_output([cmd] if isinstance(cmd, str) else cmd) is not None


def smi_output(command: Sequence[str]) -> str | None:
    """What a vendor's monitoring program prints; None when it is missing, fails or takes more than ten seconds."""
    program, *arguments = command
    path = shutil.which(program) or shutil.which(program, path=os.pathsep.join(_SMI_FOLDERS))
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
