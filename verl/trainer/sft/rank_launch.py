"""The number of ranks of a fine-tuning run; starts them by torchrun unless the user did."""

import logging
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from verl.config import SFTConfig
from verl.placement.devices import check_devices_asked_for, chosen_runtime
from verl.plugin.platform import choose_platform
from verl.runtime import ray_cluster
from verl.runtime.processes import loopback_interface
from verl.runtime.rank import RankInfo
from verl.trainer.sft.lost_ranks import REPORTS, report_lost_rank
from verl.utils.cores import num_cores
from verl.utils.errors import ConfigError
from verl.utils.process_end import say_error

INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)


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


def run_torchrun(count: int, module: str, arguments: Sequence[str], root: Path) -> int:
    """Run torchrun here with `count` ranks of the program `module` on this machine; returns the exit code.

    0: done; 1: a rank failed and printed why, or was lost, which is said here; 128 + N: stopped by signal N. Where the
    other ranks were when one was lost is written to a file in `root`.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    if (interface := loopback_interface()) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // count)))  # torchrun's default is 1
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={count}"]
    with tempfile.TemporaryDirectory() as folder:  # torchrun does not delete its own log folder
        os.environ[REPORTS] = folder
        log = logging.FileHandler(Path(folder) / "launcher.txt")
        elastic = logging.getLogger("torch.distributed.elastic")
        elastic.handlers, elastic.propagate = [log], False
        try:
            torchrun([*options, f"--log-dir={folder}", "-m", module, *arguments])
        except ChildFailedError as error:
            codes = {rank: failure.exitcode for rank, failure in sorted(error.failures.items())}
            if code := next((code for code in codes.values() if code in INTERRUPTED), 0):
                return code
            if line := report_lost_rank(codes, Path(folder), root):
                say_error(f"error: {line}")
            return 1
        except SignalException as error:  # the ranks received it too, and have saved
            return 128 + error.sigval
        finally:
            del os.environ[REPORTS]
    return 0
