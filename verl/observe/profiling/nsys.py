"""Programs under NVIDIA Nsight Systems: `nsys profile` with the options of the configuration."""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.config import RunConfig
from verl.observe.profiling.rank_profiler import selects, settings_of
from verl.utils.errors import ConfigError

_DRIVER: dict[str, Any] = {
    "trace": "cuda,nvtx,cublas,ucx",
    "cuda-memory-usage": "true",
    "cuda-graph-trace": "graph",
}
_RANGES: dict[str, Any] = {"capture-range": "cudaProfilerApi", "kill": "none"}
_RANGES_A_STEP = 6  # that a rank may begin, one for each stage
_SESSION = "NSYS_PROFILING_SESSION_ID"  # which nsys sets
_STARTED = "VERL_UNDER_NSYS"  # in the environment of a driver that was started again


def uses_nsys(config: RunConfig) -> bool:
    """Whether steps of the run are recorded by nsys."""
    return config.global_profiler.tool == "nsys" and bool(config.global_profiler.steps)


def worker_options(config: RunConfig) -> dict[str, str]:
    """Options of `nsys profile` for a rank."""
    given = config.global_profiler.global_tool_config.nsys.worker_nsight_options
    ranges = _RANGES_A_STEP * len(config.global_profiler.steps or [])
    return _merged({**_DRIVER, **_RANGES, "capture-range-end": f"repeat-shutdown:{ranges}"}, given)


def controller_options(config: RunConfig) -> dict[str, str]:
    """Options of `nsys profile` for the driver."""
    return _merged(_DRIVER, config.global_profiler.global_tool_config.nsys.controller_nsight_options)


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """The defaults with what is given in their place; null keeps a default."""
    chosen = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    return {name: str(v).lower() if isinstance(v, bool) else str(v) for name, v in chosen.items()}


def reports_folder(config: RunConfig) -> Path:
    """Where the reports are that our own processes write."""
    return Path(config.global_profiler.save_path).absolute() / "nsys"


def nsys_command(options: Mapping[str, str], output: Path) -> list[str]:
    """The words before a program that is to run under nsys. `%p` of `output` is its process."""
    flags = [f"--{name}={value}" for name, value in options.items()]
    return ["nsys", "profile", *flags, f"--output={output}"]


def command_of_rank(config: RunConfig, roles: tuple[str, ...], rank: int) -> list[str]:
    """The words before the program of `rank`; none for one that is not recorded by nsys."""
    _, settings = settings_of(config, roles) or ("", None)
    if settings is None or settings.tool != "nsys" or not selects(settings, rank):
        return []
    folder = reports_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["VERL_NSYS_REPORTS"] = str(folder)  # which its ranks inherit
    return nsys_command(worker_options(config), folder / "worker_process_%p")


def start_driver_again(config: RunConfig, is_rank: bool) -> None:
    """Replace this program, the driver's command, by itself under nsys, unless it runs there. `is_rank`: it trains."""
    if not uses_nsys(config) or under_nsys():
        return
    check_nsys(is_rank=False)
    folder = reports_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    options = worker_options(config) if is_rank else controller_options(config)
    name = "worker_process_%p" if is_rank else "controller_%p"
    environment = {**os.environ, _STARTED: "1", "VERL_NSYS_REPORTS": str(folder)}
    os.execvpe("nsys", [*nsys_command(options, folder / name), *sys.orig_argv], environment)


def under_nsys() -> bool:
    """Whether nsys has started this program."""
    return _STARTED in os.environ or _SESSION in os.environ


def check_nsys(is_rank: bool) -> None:
    """ConfigError where nsys is not installed, or where the program that computes has to run under it and does not."""
    if shutil.which("nsys") is None:
        raise ConfigError(
            "tool=nsys starts programs under `nsys profile`, and there is no nsys on PATH; install NVIDIA Nsight "
            "Systems, or use tool=torch"
        )
    if is_rank and not under_nsys():
        raise ConfigError(
            "tool=nsys records the process that computes, which is this one, and nsys has not started it; start it "
            "under `nsys profile --capture-range=cudaProfilerApi` (`verl train` does so itself), or set "
            "trainer.runtime=processes"
        )
