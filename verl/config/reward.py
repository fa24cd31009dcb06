"""Rewards: a function of your own or a built-in scorer."""

from dataclasses import dataclass
from typing import Any

from verl.config.base import Section, key, section


@dataclass(frozen=True, kw_only=True)
class CustomRewardConfig(Section):
    """A reward function of your own."""

    path: str | None = key(
        None, "Python file, file://... or pkg://module that holds the function; null is built-in scorers."
    )
    name: str = key("compute_score", "Name of the function.")
    reward_kwargs: dict[str, Any] = key({}, "Arguments added to every call.")


@dataclass(frozen=True, kw_only=True)
class RewardManagerConfig(Section):
    """The reward manager: how the scorer is called, or how its value is changed."""

    name: str = key("naive", "Reward manager by name; naive puts the score on the last token.")


@dataclass(frozen=True, kw_only=True)
class RewardModelRolloutConfig(Section):
    """Devices of the servers of a reward model."""

    tensor_model_parallel_size: int = key(1, "Devices that share every tensor of a replica.", minimum=1)
    data_parallel_size: int = key(1, "Data parallelism inside one replica.", minimum=1)
    gpu_memory_utilization: float = key(0.5, "Fraction of device memory, in (0, 1].", greater_than=0, maximum=1)


@dataclass(frozen=True, kw_only=True)
class ServedRewardModelConfig(Section):
    """A reward model in servers (planned by `verl plan`; serving it is still to come)."""

    enable: bool = key(False, "Score answers with a reward model.")
    model_path: str | None = key(None, "Folder of the reward model.")
    enable_resource_pool: bool = key(False, "Devices of its own; False shares the actor's, asleep in turn.")
    nnodes: int = key(0, "enable_resource_pool: machines.", minimum=0)
    n_gpus_per_node: int = key(8, "enable_resource_pool: devices per machine.", minimum=1)
    rollout: RewardModelRolloutConfig = section(RewardModelRolloutConfig)


@dataclass(frozen=True, kw_only=True)
class RewardConfig(Section):
    """Scoring of answers."""

    num_workers: int = key(
        8, "Calls of a plain function at once: threads, or processes of `remote` and `prime`.", minimum=1
    )
    on_error: str = key(
        "stop", "A failing scorer stops the run, or its answer is left out and counted.", choices=("stop", "count")
    )
    timeout_s: float | None = key(
        300.0, "Seconds one call may take before it counts as failed; null is no limit.", greater_than=0
    )
    retries: int = key(0, "Further attempts, after growing waits, of a call that raised or took too long.", minimum=0)
    max_errors: int | None = key(
        None, "on_error=count: answers without a score above which the run stops; null is any number.", minimum=0
    )
    max_concurrent: int = key(1, "rate_limited: calls that run at once in this process.", minimum=1)
    max_rpm: int | None = key(None, "rate_limited: calls that start within any minute; null is any number.", minimum=1)
    max_tpm: int | None = key(
        None, "rate_limited: tokens of the calls that start within any minute; null is any number.", minimum=1
    )
    estimated_tokens_per_request: int = key(2000, "max_tpm: tokens that one call is taken to cost.", minimum=1)
    weights: dict[str, float] = key(
        {},
        "Weight of each part of the reward by its name: the reward is their weighted sum. Empty: it is the score that "
        "the function returns.",
    )
    canary_size: int | None = key(
        None,
        "Fixed answers that are scored again at every step, to name a reward that changes; 0 is none. null: 8, or none "
        "where a call may cost money.",
        minimum=0,
    )
    canary_on_change: str = key(
        "auto",
        "A changed score of a fixed answer stops the run, or is a metric only (drift); auto stops where the first two "
        "scores are equal.",
        choices=("auto", "stop", "drift"),
    )
    reward_kwargs: dict[str, Any] = key({}, "Arguments of the built-in scorer, and of the dapo manager.")
    custom_reward_function: CustomRewardConfig = section(CustomRewardConfig)
    reward_manager: RewardManagerConfig = section(RewardManagerConfig)
    reward_model: ServedRewardModelConfig = section(ServedRewardModelConfig)
