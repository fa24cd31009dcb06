"""The training loop: length, devices, logging, checkpoints."""

from dataclasses import dataclass
from typing import Any

from verl.config.asynchronous import V1Config
from verl.config.base import LARGEST_SEED, Section, key, section

RESUME_MODES = ("auto", "disable", "resume_path")
ON_EXISTING = ("stop", "rename", "resume")
RUNTIMES = ("auto", "inline", "processes", "ray")
_DIR = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
_RUNTIME = (
    "Where ranks run: in the driver's process, in processes of this machine, or as actors of Ray. auto is ray with "
    "nnodes > 1, with RAY_ADDRESS and in a Ray job, otherwise inline on one device and processes on several."
)
_LEAD = (
    "Before the end of a capacity block (MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP, or SAGEMAKER_...) a step "
    "saves if there may be no time for another one and its checkpoint; these seconds are kept free beside."
)
_RESTARTS = (
    "How often all ranks start again from the newest checkpoint after a rank or node was lost, or stalled; once from "
    "each that the run has saved. With trainer.runtime=processes or ray."
)
_NODE_WAIT = (
    "Seconds for which a run on Ray waits for nodes that are missing, at its start and when it restarts after one was "
    "lost."
)
_STALL_TIMEOUT = (
    "Seconds without CPU time and bytes after which ranks inside a call have stalled: the run says which one and "
    "where, and restarts (max_restarts) or ends. 0 is never. With trainer.runtime=processes or ray, on Linux."
)
_LOGGER = "Trackers: console, file, tensorboard, wandb, mlflow, swanlab, trackio, clearml."
_TRACKER_ERRORS = (
    "A tracker that cannot start, log or finish ends the run (raise), or is named in a warning while the run goes on "
    "without it (warn)."
)
_ON_EXISTING = (
    "Where the folder or the metrics file holds steps of another configuration: stop, take the next free name, or go "
    "on with the new one. With experiment_name=auto, resume goes on with the newest run of this configuration."
)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig(Section):
    """The training loop."""

    total_epochs: int = key(30, "Passes over the training rows.", minimum=1)
    total_training_steps: int | None = key(None, "Last step; null is total_epochs x steps per epoch.", minimum=1)
    project_name: str = key("verl_examples", "Name of the project in trackers and paths.")
    experiment_name: str = key("auto", "Name of the run in trackers and paths; auto is <algorithm>-<date>-<counter>.")
    logger: list[str] = key(["console", "file"], _LOGGER)
    tracker_errors: str = key("raise", _TRACKER_ERRORS, choices=("raise", "warn"))
    prometheus_port: int | None = key(
        None, "Port where the driver exports metrics for Prometheus; 0 is any, null is off.", minimum=0, maximum=65535
    )
    prometheus_address: str = key("127.0.0.1", "Address it listens at; 0.0.0.0 lets every machine read the metrics.")
    log_val_generations: int = key(
        0, "Validation answers that are printed, and sent as a table to each tracker but file.", minimum=0
    )
    rollout_data_dir: str | None = key(None, "Folder for training answers as <step>.jsonl; null is off.")
    validation_data_dir: str | None = key(None, "Folder for validation answers as <step>.jsonl; null is off.")
    ledger: bool = key(True, "Store every trajectory of every training step in <default_local_dir>/ledger.")
    ledger_keep_steps: int | None = key(None, "Newest steps that stay in the ledger; null is all.", minimum=1)
    runtime: str = key("auto", _RUNTIME, choices=RUNTIMES)
    device: str = key("auto", "Device type (cuda, npu, cpu, ...); auto is what the platform detects.")
    nnodes: int = key(1, "Machines; with the same number of ranks each, through Ray.", minimum=1)
    n_gpus_per_node: int | None = key(
        None, "Devices per machine, one rank on each; null is all of them. On a CPU: ranks, null is 1.", minimum=1
    )
    stall_timeout_s: float = key(30.0, _STALL_TIMEOUT, minimum=0.0)
    max_restarts: int = key(3, _RESTARTS, minimum=0)
    node_wait_s: float = key(0.0, _NODE_WAIT, minimum=0.0)
    balance_batch: bool = key(True, "Assign sequences to ranks so that all have about equal work.")
    critic_warmup: int = key(0, "Number of first steps that train only the critic.", minimum=0)
    val_before_train: bool = key(True, "Validate before the first step.")
    val_only: bool = key(False, "Validate and stop.")
    test_freq: int = key(-1, "Validate every N steps and at the end; <= 0: only before step 1 (val_before_train).")
    save_freq: int | None = key(
        None, "Save every save_freq steps, and at the end; null is only at the end, <= 0 is never."
    )
    default_local_dir: str = key(_DIR, "Folder of checkpoints.")
    default_hdfs_dir: str | None = key(
        None,
        "Folder, in HDFS or of this machine: every checkpoint is copied below <project_name>/<experiment_name> there.",
    )
    max_actor_ckpt_to_keep: int | None = key(None, "Newest actor checkpoints to keep; null is all.", minimum=1)
    max_critic_ckpt_to_keep: int | None = key(None, "Newest critic checkpoints to keep; null is all.", minimum=1)
    resume_mode: str = key(
        "auto", "Start from the newest checkpoint, from none, or from one path.", choices=RESUME_MODES
    )
    resume_from_path: str | None = key(None, "Folder global_step_N for resume_mode=resume_path.")
    on_existing: str = key("stop", _ON_EXISTING, choices=ON_EXISTING)
    del_local_ckpt_after_load: bool = key(
        False, "Delete the checkpoint in default_local_dir that the run goes on from, once the next one is saved."
    )
    esi_redundant_time: int = key(0, _LEAD, minimum=0)
    v1: V1Config = section(V1Config)


@dataclass(frozen=True, kw_only=True)
class RayKwargsConfig(Section):
    """Arguments for Ray."""

    ray_init: dict[str, Any] = key({}, "Arguments of ray.init, such as num_cpus or runtime_env.")
    timeline_json_file: str | None = key(None, "File for Ray's timeline, written at the end.")
    devices_per_rank: float = key(1.0, "Share of a device (on a CPU: of a core) for a rank.", greater_than=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class SFTTrainerConfig(Section):
    """The loop of supervised fine-tuning."""

    total_epochs: int = key(4, "Passes over the training rows.", minimum=1)
    total_training_steps: int | None = key(None, "Last step; null is total_epochs x steps per epoch.", minimum=1)
    project_name: str = key("gsm8k-sft", "Name of the project in trackers and paths.")
    experiment_name: str = key("auto", "Name of the run in trackers and paths; auto is sft-<date>-<counter>.")
    logger: list[str] = key(["console", "file"], _LOGGER)
    tracker_errors: str = key("raise", _TRACKER_ERRORS, choices=("raise", "warn"))
    prometheus_port: int | None = key(
        None, "Port where rank 0 exports metrics for Prometheus; 0 is any, null is off.", minimum=0, maximum=65535
    )
    prometheus_address: str = key("127.0.0.1", "Address it listens at; 0.0.0.0 lets every machine read the metrics.")
    seed: int = key(1, "Seed of data order and initialisation.", minimum=0, maximum=LARGEST_SEED)
    runtime: str = key("auto", _RUNTIME, choices=RUNTIMES)
    device: str = key("auto", "Device type (cuda, npu, cpu, ...); auto is what the platform detects.")
    nnodes: int = key(1, "Machines, with the same number of ranks each: through Ray, or a torchrun on each.", minimum=1)
    n_gpus_per_node: int | None = key(
        None, "Devices per machine, one rank on each; null is all of them. On a CPU: ranks, null is 1.", minimum=1
    )
    stall_timeout_s: float = key(
        30.0, "Seconds without CPU time and bytes until the run names a stalled rank and ends; 0 is never.", minimum=0.0
    )
    node_wait_s: float = key(0.0, "Seconds for which a run on Ray waits at its start for missing nodes.", minimum=0.0)
    balance_batch: bool = key(True, "Assign sequences to ranks so that all have about equal work.")
    test_freq: int | str = key(-1, "Validate every test_freq steps, or after_each_epoch; <= 0 is only at the end.")
    save_freq: int | str = key(-1, "Save every save_freq steps, or after_each_epoch; <= 0 is only at the end.")
    default_local_dir: str = key(_DIR, "Folder of checkpoints.")
    default_hdfs_dir: str | None = key(
        None,
        "Folder, in HDFS or of this machine: every checkpoint is copied below <project_name>/<experiment_name> there.",
    )
    max_ckpt_to_keep: int | None = key(None, "Newest checkpoints to keep; null is all.", minimum=1)
    resume_mode: str = key(
        "auto", "Start from the newest checkpoint, from none, or from one path.", choices=RESUME_MODES
    )
    resume_from_path: str | None = key(None, "Folder global_step_N to start from; auto prefers it to the newest.")
    on_existing: str = key("stop", _ON_EXISTING, choices=ON_EXISTING)
    profile_interval: list[int] = key([-1, -1], "First and last profiled step; -1 is none.")
