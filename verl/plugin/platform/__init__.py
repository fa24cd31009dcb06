"""Hardware platforms: `get_platform()` returns that of this process. This import does not load torch."""

from verl.plugin.platform.accelerator import TorchAccelerator
from verl.plugin.platform.cpu import PlatformCPU
from verl.plugin.platform.cuda import PlatformCUDA
from verl.plugin.platform.npu import PlatformNPU
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry, choose_platform, get_platform, set_platform
from verl.plugin.platform.rocm import PlatformROCm

PlatformRegistry.register("nvidia")(PlatformCUDA)
PlatformRegistry.register("amd")(PlatformROCm)
PlatformRegistry.register("huawei")(PlatformNPU)
PlatformRegistry.register("cpu")(PlatformCPU)

__all__ = ["PlatformBase", "PlatformRegistry", "TorchAccelerator", "choose_platform", "get_platform", "set_platform"]
