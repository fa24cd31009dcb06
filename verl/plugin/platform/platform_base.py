"""PlatformBase: names and capabilities of a kind of device, implemented by every vendor."""

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
    """One kind of device. A vendor implements the abstract members; the others have a safe default.

    The constructor must be cheap and must not use a device: detection constructs several platforms and uses one.
    """

    @property
    @abstractmethod
    def device_name(self) -> str:
        """The torch device type, such as "cuda"."""

    @property
    @abstractmethod
    def vendor_name(self) -> str:
        """The vendor; an engine is looked up by device and vendor."""

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
        """Make `device_index` the current device of this process."""

    @abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has finished its queued work."""

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
        """Free cached, unused device memory."""

    @abstractmethod
    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Compute capability (major, minor), or (None, None) where the device has none."""

    @abstractmethod
    def communication_backend_name(self) -> str:
        """The torch.distributed backend for tensors on this device."""

    @abstractmethod
    def visible_devices_envvar(self) -> str:
        """The environment variable that sets a process's visible devices; empty when there is none."""

    @abstractmethod
    def nvtx_range(self, msg: str) -> AbstractContextManager[Any]:
        """A named range in the vendor's profiler, or a context that does nothing."""

    @abstractmethod
    def profiler_start(self) -> None:
        """Start the recording of an attached profiler."""

    @abstractmethod
    def profiler_stop(self) -> None:
        """Stop the recording of an attached profiler."""

    @abstractmethod
    def ray_resource_name(self) -> str:
        """Ray's resource name of this device, such as "GPU"."""

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

    def collectives_handler(self) -> str | None:
        """The handler of torch's worker server that tells, as its flight recorder's JSON, in which collectives this
        device is; None where a rank that waits in one sleeps, or nothing tells it."""
        return None

    def get_device_uuid(self, device_id: int) -> str:
        """A device name that is the same in processes with different visible devices."""
        visible = self.visible_devices()
        return f"{self.ray_resource_name()}-{visible[device_id] if device_id < len(visible) else device_id}"

    def visible_devices_envvars(self) -> tuple[str, ...]:
        """All variables that set a process's visible devices, the one that the runtime obeys first."""
        return (self.visible_devices_envvar(),) if self.visible_devices_envvar() else ()

    def visible_devices(self) -> list[str]:
        """Names of the devices that the environment shows to this process, in order; empty where it shows all."""
        listed = (os.environ.get(name, "").strip() for name in self.visible_devices_envvars())
        return [part.strip() for part in next(filter(None, listed), "").split(",") if part.strip()]

    def rollout_environment(self, devices: Sequence[int] = ()) -> dict[str, str]:
        """Environment of a process that serves rollouts and sees only `devices` (indices among this process's own),
        or with none the same as this process."""
        visible = self.visible_devices()
        shown = ",".join(visible[device] if visible else str(device) for device in devices)
        return {
            **os.environ,
            **self.rollout_env_vars(),
            **{name: shown for name in self.visible_devices_envvars() if devices},
        }

    def apply_model_patches(self, model_type: str) -> None:  # noqa: B027
        """Change model code for this device; called before a model of `model_type` is built."""

    def compiles_triton(self) -> bool:
        """Whether Triton kernels, and with them torch.compile's, run on this device."""
        return False

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the current device."""
        free, total = self.device_module.mem_get_info()
        return int(free), int(total)

    def total_memory(self) -> int:
        """Bytes of the first device, which are read without opening a context on it where the device module can."""
        properties = getattr(self.device_module, "get_device_properties", None)
        return int(properties(0).total_memory) if properties else self.memory_info()[1]

    def device_memory_used(self) -> int:
        """Bytes of the current device that all processes together use; 0 where the device module does not say."""
        free, total = self.memory_info() if hasattr(self.device_module, "mem_get_info") else (0, 0)
        return total - free

    def peak_memory(self) -> tuple[int, int]:
        """Peak (allocated, reserved) bytes since `reset_peak_memory`; 0 where the device module has no counter."""
        module = self.device_module
        allocated = getattr(module, "max_memory_allocated", None)
        reserved = getattr(module, "max_memory_reserved", None)
        return (int(allocated()) if allocated else 0, int(reserved()) if reserved else 0)

    def reset_peak_memory(self) -> None:
        """Reset the peaks of `peak_memory`."""
        reset = getattr(self.device_module, "reset_peak_memory_stats", None)
        if reset:
            reset()

    def driver_version(self) -> str | None:
        """The installed kernel driver's version, or None where it is unknown."""
        return None

    def runtime_version(self) -> str | None:
        """The version of the vendor's runtime (CUDA, ROCm, CANN) that torch uses, or None."""
        return None

    def sleep_mode_blocker(self, vllm_version: str | None) -> str | None:
        """Why vLLM of this version cannot free its memory between rollouts, or None when it can."""
        return None

    def findings(self) -> "list[Finding]":
        """Findings of `verl doctor` about driver, runtime and host for this platform."""
        return []

    def backend_support(self) -> "list[BackendSupport]":
        """The vendor's support table for this device, without checks of this machine."""
        return []

    @staticmethod
    def check_smi_command(cmd: str | Sequence[str]) -> bool:
        """Whether a vendor's monitoring program exists and exits with code 0 within ten seconds."""
        return smi_output([cmd] if isinstance(cmd, str) else cmd) is not None


def smi_output(command: Sequence[str]) -> str | None:
    """Output of a vendor's monitoring program; None when it is missing, fails or takes more than ten seconds."""
    program, *arguments = command
    path = shutil.which(program) or shutil.which(program, path=os.pathsep.join(_SMI_FOLDERS))
    if path is None:
        return None
    try:
        result = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None
