"""NVIDIA GPUs."""

import importlib
from contextlib import AbstractContextManager
from typing import Any

from verl.plugin.findings import BackendSupport, Finding, Status
from verl.plugin.installed import has_module
from verl.plugin.platform.accelerator import TorchAccelerator, flagcx_or
from verl.plugin.platform.platform_base import smi_output
from verl.plugin.versions import at_least

MINIMUM_CUDA = "12.8"


class PlatformCUDA(TorchAccelerator):
    """torch.cuda on NVIDIA hardware."""

    @property
    def device_name(self) -> str:
        return "cuda"

    @property
    def vendor_name(self) -> str:
        return "nvidia"

    @property
    def device_module(self) -> Any:
        import torch

        return torch.cuda

    def compiles_triton(self) -> bool:
        """True for NVIDIA and AMD GPUs."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Whether torch was built for CUDA, and nvidia-smi works (`use_smi_check`) or a device is usable (otherwise).

        The first probe needs nvidia-smi, so that it does not claim a CUDA-compatible chip of another vendor. The second
        probe (no smi) finds NVIDIA GPUs in containers that lack the program.
        """
        import torch

        if torch.version.hip is not None or torch.version.cuda is None:
            return False
        return self.check_smi_command("nvidia-smi") if use_smi_check else self.is_available()

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return self.device_module.get_device_capability(device_index)

    def communication_backend_name(self) -> str:
        return flagcx_or("nccl")

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> AbstractContextManager[Any]:
        return self.device_module.nvtx.range(msg)

    def profiler_start(self) -> None:
        self.device_module.profiler.start()

    def profiler_stop(self) -> None:
        self.device_module.profiler.stop()

    def ray_resource_name(self) -> str:
        return "GPU"

    def is_ipc_supported(self) -> bool:
        return True

    def cudart(self) -> Any:
        return self.device_module.cudart()

    def rollout_env_vars(self) -> dict[str, str]:
        return {"NCCL_CUMEM_ENABLE": "0"}

    def collectives_handler(self) -> str | None:
        return "dump_nccl_trace_json" if self.communication_backend_name() == "nccl" else None

    def get_collective_module(self) -> Any:
        if not has_module("cupy"):
            return None
        return importlib.import_module("cupy.cuda.nccl")

    def driver_version(self) -> str | None:
        output = smi_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        return next(iter((output or "").split()), None)

    def runtime_version(self) -> str | None:
        import torch

        return torch.version.cuda

    def findings(self) -> list[Finding]:
        version = self.runtime_version()
        if version is None:
            return [Finding("CUDA", Status.BAD, "this torch is built without CUDA", "install a CUDA build of torch")]
        if at_least(version, MINIMUM_CUDA):
            return [Finding("CUDA", Status.GOOD, f"{version} (>= {MINIMUM_CUDA})")]
        next_move = f"install a torch built for CUDA {MINIMUM_CUDA} or newer, and a driver that can run it"
        return [Finding("CUDA", Status.BAD, f"{version}, but {MINIMUM_CUDA} is the oldest supported", next_move)]

    def backend_support(self) -> list[BackendSupport]:
        return [
            BackendSupport("fsdp", Status.GOOD, "supported"),
            BackendSupport("fsdp2", Status.GOOD, "supported"),
            BackendSupport("megatron", Status.GOOD, "supported", requires=("megatron.core",)),
            BackendSupport("native", Status.GOOD, "supported"),
            BackendSupport("vllm", Status.GOOD, "supported", requires=("vllm",)),
            BackendSupport("sglang", Status.GOOD, "supported", requires=("sglang",)),
            BackendSupport("multi-turn", Status.GOOD, "supported"),
            BackendSupport("lora", Status.GOOD, "supported", requires=("peft",)),
            BackendSupport("expert-parallel", Status.GOOD, "supported"),
        ]
