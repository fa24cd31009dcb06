"""The ranks of a fine-tuning run: how many there are, who starts them, and the workers of each."""

import dataclasses
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from verl.config import HFModelConfig, SFTConfig
from verl.config.base import record_reads, recorded_reads
from verl.models.fastest import keep_choices_in
from verl.observe.profiling.nsys import check_nsys
from verl.observe.profiling.rank_profiler import RankProfiler
from verl.placement.devices import check_devices_asked_for, chosen_runtime, report_local_head
from verl.plugin.platform import choose_platform, get_platform
from verl.runtime import ray_cluster
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.launched_ranks import LaunchedGroup
from verl.runtime.processes import ProcessGroup
from verl.runtime.rank import RankInfo
from verl.runtime.ray_cluster import Devices, join_cluster
from verl.runtime.ray_group import RayGroup
from verl.trainer.run.header import say
from verl.trainer.sft.objectives import objective_of
from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external
from verl.workers.actor import with_schedule_length
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.rng import seed_generators
from verl.workers.engine_worker import EngineWorker
from verl.workers.reference import frozen_worker


class SFTRank:
    """The trained model of one rank, and its reference if the loss has one: a frozen copy of the model, or, with LoRA,
    the model without its adapters. Building it is a collective, and seeds the process's random generators."""

    reference: EngineWorker

    def __init__(self, config: SFTConfig, model: HFModelConfig, total_steps: int):
        keep_choices_in(Path(config.trainer.default_local_dir))
        import_external(config.model.external_lib)  # which may register the loss
        seed_generators(config.trainer.seed)
        if config.trainer.profile_interval[0] > 0 and config.profiler.enable and config.profiler.tool == "nsys":
            check_nsys(is_rank=True)
        self.profiler = RankProfiler(config.profiler, "sft", RankInfo.from_environment().rank)
        objective, settings = objective_of(config), config.training_engine
        if config.data.pad_mode == "right":
            model = dataclasses.replace(model, use_remove_padding=False)
        optim = with_schedule_length(config.optim, total_steps)
        kind, strategy = objective.model_type, config.engine.strategy
        engine = EngineRegistry.new(kind, strategy, model, settings, optim, config.checkpoint)
        self.trained = EngineWorker(engine, objective.loss)
        if "ref_logprobs" in objective.loss.columns:
            self.reference = frozen_worker(self.trained)

    def config_keys_read(self) -> list[tuple[str, str]]:
        """The configuration keys that this process has read."""
        return sorted(recorded_reads())


def build_sft_rank(config: SFTConfig, model: HFModelConfig, total_steps: int) -> SFTRank:
    """`SFTRank` of a new process, which first turns on the recording of configuration reads."""
    record_reads(True)
    return SFTRank(config, model, total_steps)


def start_ranks(config: SFTConfig, model: HFModelConfig, total_steps: int, ending: ExitStack) -> WorkerGroup:
    """The ranks, each an `SFTRank`; `ending` closes them."""
    settings, count = config.trainer, num_ranks_to_start(config)
    if "WORLD_SIZE" not in os.environ:
        report_local_head(settings, say)
    here, layout = partial(SFTRank, config, model, total_steps), Layout.data_parallel(count or 1)
    elsewhere, timeout_s = partial(build_sft_rank, *here.args), settings.stall_timeout_s
    group: WorkerGroup
    if count and chosen_runtime(settings) == "ray":
        cluster = join_cluster(config.ray_kwargs.ray_init, config.ray_kwargs.timeline_json_file)
        ending.callback(cluster.leave)
        say(cluster.describe(get_platform(), count))
        share, name = config.ray_kwargs.devices_per_rank, f"verl-{settings.experiment_name}-sft"
        devices = Devices(get_platform(), settings.nnodes, share, name, settings.node_wait_s)
        group = RayGroup(elsewhere, layout, devices, stall_timeout_s=timeout_s)
    elif count:
        group = ProcessGroup(elsewhere, layout, stall_timeout_s=timeout_s)
    elif RankInfo.from_environment().world_size > 1:
        group = LaunchedGroup(here, Path(settings.default_local_dir), timeout_s)
    else:
        group = InlineGroup(here())
    ending.callback(group.close)
    return group


def num_ranks_to_start(config: SFTConfig) -> int:
    """How many ranks must be started before the run can begin; 0 when this process is one of them, or the only one."""
    settings = config.trainer
    platform = choose_platform(settings.device)
    if "WORLD_SIZE" in os.environ:
        _check_against_torchrun(config, RankInfo.from_environment())
        return 0
    runtime, count = chosen_runtime(settings), settings.n_gpus_per_node
    if settings.nnodes > 1 and not (runtime == "ray" and ray_cluster.is_installed()):
        raise ConfigError(
            f"trainer.nnodes={settings.nnodes} needs trainer.runtime=ray (pip install -e '.[ray]'), or one start per "
            f"machine: torchrun --nnodes={settings.nnodes} --nproc-per-node=DEVICES --rdzv-backend=c10d "
            f"--rdzv-endpoint=HOST:PORT -m {config.module} key=value ..."
        )
    if runtime == "ray":
        ray_cluster.check_installed()
    if runtime == "inline":
        if (count or 1) > 1:
            raise ConfigError(
                f"trainer.runtime=inline is one process, but trainer.n_gpus_per_node={count}; drop one of them"
            )
        return 0
    check_devices_asked_for(settings, platform)
    if count is None:
        count = 1 if platform.device_name == "cpu" else platform.device_count()
    return count * settings.nnodes if count > 1 or runtime in ("processes", "ray") else 0


def _check_against_torchrun(config: SFTConfig, rank: RankInfo) -> None:
    """Under torchrun the number of ranks is torchrun's; a configuration that says otherwise is a mistake."""
    machines = rank.world_size // rank.local_world_size
    for name, configured, started in (
        ("n_gpus_per_node", config.trainer.n_gpus_per_node, rank.local_world_size),
        ("nnodes", None if config.trainer.nnodes == 1 else config.trainer.nnodes, machines),
    ):
        if configured is not None and configured != started:
            raise ConfigError(
                f"trainer.{name}={configured}, but torchrun started {started}; drop the key, torchrun decides"
            )
