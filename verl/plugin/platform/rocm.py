"""AMD GPUs through ROCm. torch names the device "cuda"; this file has what differs from NVIDIA."""

import os
from pathlib import Path

from verl.plugin.findings import BackendSupport, Finding, Status
from verl.plugin.platform.cuda import PlatformCUDA
from verl.plugin.versions import at_least, newer_than

MINIMUM_ROCM = "7.0"
SAFE_CAPTURE_SIZES = "[1,2,4,8,16,32,64]"
SLEEP_MODE_AFTER_VLLM = "0.11.0"


class PlatformROCm(PlatformCUDA):
    """torch.cuda on AMD hardware (gfx942: MI300X, MI325X; gfx950: MI350X, MI355X)."""

    @property
    def vendor_name(self) -> str:
        return "amd"

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether torch was built for ROCm, and a monitoring program works (`use_smi_check`) or a device is usable."""
        import torch

        if torch.version.hip is None:
            return False
        if use_smi_check:
            return self.check_smi_command("rocm-smi") or self.check_smi_command(["amd-smi", "list"])
        return self.is_available()

    def visible_devices_envvars(self) -> tuple[str, ...]:
        """Both names that HIP knows; it obeys its own first, and vLLM refuses two values."""
        return ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

    def ray_noset_envvars(self) -> list[str]:
        names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
        return [f"RAY_EXPERIMENTAL_NOSET_{name}" for name in names]

    def rollout_env_vars(self) -> dict[str, str]:
        aiter = os.environ.get("SGLANG_USE_AITER", "1")
        return {**super().rollout_env_vars(), "SGLANG_USE_AITER": aiter}

    def driver_version(self) -> str | None:
        version = Path("/sys/module/amdgpu/version")
        return version.read_text().strip() if version.is_file() else None

    def runtime_version(self) -> str | None:
        """The ROCm release that torch was built for, such as "7.0.51831"."""
        import torch

        return torch.version.hip

    def sleep_mode_blocker(self, vllm_version: str | None) -> str | None:
        """vLLM newer than 0.11.0 can free its memory on ROCm, and only on ROCm 7.0 or newer."""
        if vllm_version is None:
            return "vLLM is not installed"
        if not newer_than(vllm_version, SLEEP_MODE_AFTER_VLLM):
            return (
                f"vLLM {vllm_version} has no sleep mode on ROCm; it needs a version newer than {SLEEP_MODE_AFTER_VLLM}"
            )
        if not at_least(self.runtime_version(), MINIMUM_ROCM):
            return f"ROCm {self.runtime_version()} cannot unmap memory; sleep mode needs {MINIMUM_ROCM} or newer"
        return None

    def findings(self) -> list[Finding]:
        version = self.runtime_version()
        if at_least(version, MINIMUM_ROCM):
            findings = [Finding("ROCm", Status.GOOD, f"{version} (>= {MINIMUM_ROCM})")]
        else:
            move = f"use an image with ROCm {MINIMUM_ROCM} or newer (docker/rocm/Dockerfile.rocm)"
            detail = f"{version or 'not in this torch'}, but {MINIMUM_ROCM} is the oldest supported"
            findings = [Finding("ROCm", Status.BAD, detail, move)]
        findings += [_device_node(Path(path)) for path in ("/dev/kfd", "/dev/dri")]
        findings += [_expandable_segments(), _GRAPHS]
        return findings

    def backend_support(self) -> list[BackendSupport]:
        return [
            BackendSupport("fsdp", Status.GOOD, "supported"),
            BackendSupport("fsdp2", Status.GOOD, "supported"),
            BackendSupport("megatron", Status.GOOD, "supported", requires=("megatron.core",)),
            BackendSupport("native", Status.GOOD, "supported"),
            BackendSupport("vllm", Status.GOOD, "validated", requires=("vllm",)),
            BackendSupport("sglang", Status.WARN, "in progress on ROCm; vllm is validated", requires=("sglang",)),
        ]


_GRAPHS = Finding(
    "CUDA graphs",
    Status.WARN,
    "capturing large batches can crash ROCm on several nodes",
    f"actor_rollout_ref.rollout.cudagraph_capture_sizes={SAFE_CAPTURE_SIZES}, then "
    "actor_rollout_ref.rollout.enforce_eager=False",
)


def _device_node(path: Path) -> Finding:
    name = str(path)
    if not path.exists():
        return Finding(name, Status.BAD, "not in this container", f"start the container with --device {name}")
    if not os.access(path, os.R_OK):
        return Finding(name, Status.BAD, "not readable", "add the user to the groups video and render")
    return Finding(name, Status.GOOD, "present")


def _expandable_segments() -> Finding:
    """Expandable segments exclude vLLM's custom all-reduce, because such segments have no IPC handles."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    name = "expandable segments"
    if "expandable_segments:true" not in settings.replace(" ", "").lower():
        return Finding(name, Status.GOOD, "off")
    move = "+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_custom_all_reduce=True, or unset PYTORCH_ALLOC_CONF"
    return Finding(name, Status.WARN, "on: conflicts with vLLM's custom all-reduce", move)
