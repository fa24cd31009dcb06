"""Profiles of rollout servers by the profilers that they have themselves."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from verl.config.rollout import RolloutConfig


class ProfiledServer(ABC):
    """An engine that runs elsewhere, so that a rank's profile has nothing of it."""

    @abstractmethod
    async def set_profiling(self, on: bool) -> None:
        """Begin to record into `profile_folder`, where `rollout.profiler` selects the replica, or end."""


def profile_folder(config: RolloutConfig, replica: int) -> str | None:
    """Where the server of `replica` writes its traces; None where torch's profiler does not record it."""
    settings = config.profiler
    if settings.tool != "torch" or not settings.enable or not (settings.all_ranks or replica in settings.ranks):
        return None
    return str(Path(settings.save_path or "outputs/profile").absolute() / f"agent_loop_rollout_replica_{replica}")


def vllm_profiler(config: RolloutConfig, replica: int) -> dict[str, Any] | None:
    """vLLM's `profiler_config`; None where it is not recorded."""
    if (folder := profile_folder(config, replica)) is None:
        return None
    contents = config.profiler.tool_config.torch.contents
    found = {name: name in contents for name in ("stack", "memory")}
    return {
        "profiler": "torch",
        "torch_profiler_dir": folder,
        **{f"torch_profiler_with_{name}": on for name, on in found.items()},
        "torch_profiler_record_shapes": "shapes" in contents,
    }


class VLLMProfiling:
    """vLLM's part in the process where it runs."""

    config: RolloutConfig
    replica: int
    llm: Any

    async def set_profiling(self, on: bool) -> None:
        """Begin or end vLLM's own profile, where it was configured."""
        if profile_folder(self.config, self.replica) is not None:
            self.llm.start_profile() if on else self.llm.stop_profile()
