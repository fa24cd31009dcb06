"""Which runtime a run is for, and whether its devices were meant."""

import os
from collections.abc import Callable
from typing import Any

from verl.config.trainer import SFTTrainerConfig, TrainerConfig
from verl.plugin.platform import PlatformBase
from verl.runtime.ray_cluster import asked_for_by_environment, local_head
from verl.utils.cores import num_cores
from verl.utils.errors import ConfigError


def check_devices_asked_for(settings: Any, platform: PlatformBase, others: dict[str, int] | None = None) -> None:
    """ConfigError where several devices are asked for by number and the CPU is only what is left.

    `others` are the numbers of roles with ranks of their own, by key.
    """
    by_key = {"trainer.n_gpus_per_node": settings.n_gpus_per_node or 1, **(others or {})}
    count, asked = sum(by_key.values()), " and ".join(f"{key}={number}" for key, number in by_key.items())
    if platform.device_name == "cpu" and settings.device == "auto" and count > 1 and not _platform_is_chosen():
        raise ConfigError(
            f"{asked} asks for {count} GPUs, but this machine has none; trainer.device=cpu "
            f"starts {count} ranks on its {num_cores()} CPU cores, trainer.n_gpus_per_node=1 starts one"
        )


def chosen_runtime(settings: TrainerConfig | SFTTrainerConfig) -> str:
    """`trainer.runtime`; auto is ray where several machines or a Ray cluster are asked for, and otherwise stays auto:
    one rank inline, several in processes."""
    asked = settings.nnodes > 1 or asked_for_by_environment() is not None
    return "ray" if settings.runtime == "auto" and asked else settings.runtime


def report_local_head(settings: TrainerConfig | SFTTrainerConfig, announce: Callable[[str], None]) -> None:
    """Tell `announce` of a Ray on this machine that `trainer.runtime=auto` does not join."""
    if chosen_runtime(settings) == "auto" and (head := local_head()) is not None:
        announce(f"a Ray head runs on this machine at {head}; trainer.runtime=ray joins it")


def _platform_is_chosen() -> bool:
    return bool(os.environ.get("VERL_PLATFORM", "").strip())
