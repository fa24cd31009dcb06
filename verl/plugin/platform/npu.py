"""Huawei Ascend NPUs through torch_npu, CANN and HCCL."""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from verl.plugin.findings import BackendSupport, Finding, Status
from verl.plugin.installed import has_module, version_of
from verl.plugin.platform.accelerator import TorchAccelerator, flagcx_or
from verl.plugin.versions import at_least

IPC_DRIVER = "25.3.rc1"
IPC_CANN = "8.3.rc1"
MINIMUM_CANN = "8.5.0"
ALLOCATOR_TORCH_NPU = "2.9"
_TOOLKIT = "/usr/local/Ascend/ascend-toolkit"
_DRIVER_INFO = Path("/usr/local/Ascend/driver/version.info")


class PlatformNPU(TorchAccelerator):
    """torch.npu; importing torch_npu adds the device to torch."""

    @property
    def device_name(self) -> str:
        return "npu"

    @property
    def vendor_name(self) -> str:
        return "huawei"

    @property
    def device_module(self) -> Any:
        import torch

        importlib.import_module("torch_npu")
        return torch.npu  # type: ignore[attr-defined]

    def is_available(self) -> bool:
        if not has_module("torch_npu"):
            return False
        return super().is_available()

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether torch_npu imports; also true where the devices are hidden from this process."""
        if not has_module("torch_npu"):
            return False
        importlib.import_module("torch_npu")
        return True

    def set_allocator_settings(self, settings: str) -> None:
        """Configure the allocator; an older torch_npu cannot at run time, which is only a warning."""
        version = version_of("torch_npu", "torch-npu")
        if not at_least(version, ALLOCATOR_TORCH_NPU):
            import warnings

            text = f"torch_npu {version} cannot apply allocator settings {settings!r} at run time; it needs "
            warnings.warn(text + f"{ALLOCATOR_TORCH_NPU}, or PYTORCH_NPU_ALLOC_CONF before the start", stacklevel=2)
            return
        super().set_allocator_settings(settings)

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        read = getattr(self.device_module, "get_device_capability", None)
        return (read(device_index) if read else None) or (None, None)

    def communication_backend_name(self) -> str:
        return flagcx_or("hccl")

    def visible_devices_envvar(self) -> str:
        return "ASCEND_RT_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "NPU"

    def is_ipc_supported(self) -> bool:
        return at_least(driver_version(), IPC_DRIVER) and at_least(cann_version(), IPC_CANN)

    def rollout_env_vars(self) -> dict[str, str]:
        """For vllm-ascend: no automatic quantisation, and TASK_QUEUE_ENABLE as chosen for it."""
        env = {"NCCL_CUMEM_ENABLE": "0", "VLLM_ASCEND_AUTO_DETECT_QUANTIZATION": "0"}
        queue = os.environ.get("VLLM_ASCEND_TASK_QUEUE_ENABLE")
        return env if queue is None else {**env, "TASK_QUEUE_ENABLE": queue}

    def driver_version(self) -> str | None:
        return driver_version()

    def runtime_version(self) -> str | None:
        return cann_version()

    def findings(self) -> list[Finding]:
        return [_cann_finding(), _cann_environment(), _ipc_finding(), _vllm_ascend_finding()]

    def backend_support(self) -> list[BackendSupport]:
        return [
            BackendSupport("fsdp", Status.GOOD, "through torch_npu"),
            BackendSupport("fsdp2", Status.GOOD, "supported"),
            BackendSupport("megatron", Status.GOOD, "through MindSpeed", requires=("megatron.core", "mindspeed")),
            BackendSupport("veomni", Status.GOOD, "its keys; the fsdp2 engine runs"),
            BackendSupport("native", Status.GOOD, "supported"),
            BackendSupport("vllm", Status.GOOD, "through vllm-ascend", requires=("vllm", "vllm_ascend")),
            BackendSupport("sglang", Status.GOOD, "supported", requires=("sglang",)),
        ]


def cann_version() -> str | None:
    """The installed CANN toolkit's version, or None."""
    homes = [os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME"), f"{_TOOLKIT}/latest"]
    for home in filter(None, homes):
        for info in sorted(Path(home).glob("*-linux/ascend_toolkit_install.info")):
            if version := _read_version(info):
                return version
    return None


def driver_version() -> str | None:
    """The installed Ascend driver's version, or None."""
    return _read_version(_DRIVER_INFO)


def _read_version(path: Path) -> str | None:
    if not path.is_file():
        return None
    match = re.search(r"^\s*version\s*=\s*(\S+)", path.read_text(errors="replace"), re.IGNORECASE | re.MULTILINE)
    return match.group(1).lower() if match else None


def _cann_finding() -> Finding:
    version = cann_version()
    if version is None:
        return Finding("CANN", Status.BAD, "no toolkit found", f"install CANN, then source {_TOOLKIT}/set_env.sh")
    if at_least(version, MINIMUM_CANN):
        return Finding("CANN", Status.GOOD, f"{version} (>= {MINIMUM_CANN})")
    return Finding("CANN", Status.WARN, f"{version}, tested from {MINIMUM_CANN} on", f"install CANN {MINIMUM_CANN}")


def _cann_environment() -> Finding:
    missing = [name for name in ("ASCEND_HOME_PATH", "ATB_HOME_PATH") if not os.environ.get(name)]
    if not missing:
        return Finding("CANN environment", Status.GOOD, "sourced")
    move = f"source {_TOOLKIT}/set_env.sh and /usr/local/Ascend/nnal/atb/set_env.sh"
    return Finding("CANN environment", Status.BAD, f"{' and '.join(missing)} not set", move)


def _ipc_finding() -> Finding:
    driver, cann = driver_version(), cann_version()
    versions = f"driver {driver or 'unknown'}, CANN {cann or 'unknown'}"
    if at_least(driver, IPC_DRIVER) and at_least(cann, IPC_CANN):
        return Finding("device IPC", Status.GOOD, versions)
    move = f"driver {IPC_DRIVER} and CANN {IPC_CANN} or newer transfer weights without a copy"
    return Finding("device IPC", Status.WARN, f"{versions}: weights go through shared memory", move)


def _vllm_ascend_finding() -> Finding:
    if has_module("vllm_ascend"):
        return Finding("vllm-ascend", Status.GOOD, "installed")
    return Finding("vllm-ascend", Status.WARN, "not installed", "pip install vllm-ascend to use rollout.name=vllm")
