"""Which steps of a run are profiled, from its configuration."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.config import RunConfig
from verl.config.profiler import ProfilerConfig
from verl.observe.profiling.nsys import check_nsys, start_driver_again
from verl.observe.profiling.rank_profiler import settings_of
from verl.observe.profiling.step_profiler import StepProfiler
from verl.observe.profiling.tools import build_tool
from verl.placement.plan import Plan
from verl.placement.pools import is_this_process, plan_run, pools_of
from verl.runtime.pools import Pool, WorkerPools
from verl.utils.errors import ConfigError
from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.remote.profiles import ProfiledServer


class ReplicaProfiles:
    """The profilers of rollout servers, which `wait_for` drives; one that fails is told, and does not end the run."""

    def __init__(self, engine: RolloutEngine, settings: ProfilerConfig, wait_for: Callable[[Any], Any]):
        self.engine, self.settings, self.wait_for = engine, settings, wait_for

    def start(self, name: str) -> list[str]:
        """Begin to record; what was wrong."""
        return self._set(True)

    def stop(self, name: str) -> list[str]:
        """End; the folders of the traces, which `relocate_results` moves into that of the profile."""
        if not isinstance(self.engine, ProfiledServer):
            return []
        wrong, root = self._set(False), Path(self.settings.save_path or "").absolute()
        folders = sorted(root.glob("agent_loop_rollout_replica_*"))
        if self.settings.relocate_results:
            (root / name).mkdir(parents=True, exist_ok=True)
            folders = [Path(shutil.move(folder, root / name / folder.name)) for folder in folders]
        return [*map(str, folders), *wrong]

    def _set(self, on: bool) -> list[str]:
        if isinstance(self.engine, ProfiledServer):
            try:
                self.wait_for(self.engine.set_profiling(on))
            except Exception as error:  # of any engine
                return [f"the rollout servers could not be profiled: {error}"]
        return []


def step_profiler(
    config: RunConfig,
    pools: WorkerPools,
    note: Callable[[str], None],
    servers: ReplicaProfiles,
    on_written: Callable[[str, list[str]], object],
) -> StepProfiler:
    """The profiler of the run's steps; one of no steps where nothing is to be profiled."""
    settings, profiled = config.global_profiler, any(settings_of(config, pool.roles) for pool in pools.groups)
    steps = list(settings.steps or []) if profiled else []
    return StepProfiler(steps, settings.profile_continuous_steps, pools.broadcast, note, servers, on_written)


def start_under_nsys(config: RunConfig) -> None:
    """Start the command that runs under nsys, if the driver's steps are to be recorded by it."""
    plan = plan_run(config)
    start_driver_again(config, any(is_this_process(pool, plan.runtime) for pool in pools_of(plan)))


def check_profiling(config: RunConfig, plan: Plan) -> None:
    """ConfigError for a profiler that cannot run here, or for a rank that there is not."""
    for pool in pools_of(plan):
        role, found = settings_of(config, pool.roles) or ("", None)
        if found is None:
            continue
        beyond = [rank for rank in found.ranks if not 0 <= rank < pool.num_devices]
        if beyond:
            there_are = f"there are ranks 0 to {pool.num_devices - 1}"
            raise ConfigError(f"profiler.ranks of {role} has {beyond[0]}, but {there_are}")
        build_tool(str(found.tool), found.tool_config, None)
        if found.tool == "nsys" and config.global_profiler.steps:
            check_nsys(is_rank=is_this_process(pool, plan.runtime))


def idle_profilers(config: RunConfig, pools: tuple[Pool, ...]) -> list[str]:
    """A warning for settings that record nothing."""
    settings, enabled = config.global_profiler, any(settings_of(config, pool.roles) for pool in pools)
    if settings.tool is not None and settings.steps and not enabled:
        return [
            f"global_profiler.tool={settings.tool} records nothing: no role that runs is enabled; set "
            "actor_rollout_ref.actor.profiler.enable=True actor_rollout_ref.actor.profiler.all_ranks=True"
        ]
    if enabled and not settings.steps:
        return ["a profiler is enabled, but global_profiler.steps names no step: nothing is recorded"]
    return []
