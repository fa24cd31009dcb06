"""Asynchronous training: where answers are sampled while the policy is trained, and how old they may be."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.config.base import Section, key, section
from verl.utils.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.run_config import RunConfig

SYNC, COLOCATED, SEPARATE = "sync", "colocate_async", "separate_async"
_MODE = (
    "sync: a step waits for all of its answers. colocate_async: a step takes the answers that are finished; the others "
    "are parked while the policy is trained on the same devices, and go on under the new weights. separate_async: the "
    "rollout has devices of its own (actor_rollout_ref.hybrid_engine=False) and samples while the policy is trained."
)
_STRATEGY = (
    "What happens to a group that would become older than max_off_policy_threshold: the step waits for it, or it is "
    "dropped, counted, and another prompt takes its place."
)
_STALENESS = (
    "Mean age of answers when they are trained, in versions of the weights; fractions are allowed, 0 is synchronous. "
    "null is the mode's num_warmup_batches."
)


@dataclass(frozen=True, kw_only=True)
class SamplerConfig(Section):
    """Which groups a step trains on."""

    sync_refill_failed_groups: bool = key(
        False, "Replace a prompt whose answers all got no reward by the next one; filter_groups always does."
    )
    max_off_policy_threshold: int = key(
        8, "Largest age of answers when they are trained, in versions: at least staleness + 1.", minimum=1
    )
    max_off_policy_strategy: str = key("wait", _STRATEGY, choices=("wait", "drop"))


@dataclass(frozen=True, kw_only=True)
class ColocateAsyncConfig(Section):
    """Asynchronous training on the devices of the rollout."""

    num_warmup_batches: int = key(
        1, "Batches of prompts under way beside the one of the step; staleness_threshold is the same with fractions.",
        minimum=0,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SeparateAsyncConfig(Section):
    """Asynchronous training with devices of its own for the rollout."""

    num_warmup_batches: int = key(
        1, "Batches of prompts under way beside the one of the step; staleness_threshold is the same with fractions.",
        minimum=0,
    )  # fmt: skip
    parameter_sync_step: int | None = key(
        None, "Mini-batches a publish; null is data.train_batch_size / ppo_mini_batch_size, and no other is allowed.",
        minimum=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class V1Config(Section):
    """Where trajectories come from."""

    trainer_mode: str = key(SYNC, _MODE, choices=(SYNC, COLOCATED, SEPARATE))
    sampler: SamplerConfig = section(SamplerConfig)
    colocate_async: ColocateAsyncConfig = section(ColocateAsyncConfig)
    separate_async: SeparateAsyncConfig = section(SeparateAsyncConfig)


@dataclass(frozen=True, kw_only=True)
class AsyncTrainingConfig(Section):
    """How far the rollout may be ahead of the trainer."""

    staleness_threshold: float | None = key(None, _STALENESS, minimum=0.0)
    trigger_parameter_sync_step: int | None = key(
        None, "Mini-batches a publish, in units of require_batches; data.train_batch_size may be 0 or left out.",
        minimum=1,
    )  # fmt: skip
    require_batches: int | None = key(
        None,
        "Factor of trigger_parameter_sync_step: train_batch_size is their product x ppo_mini_batch_size.",
        minimum=1,
    )


@dataclass(frozen=True, kw_only=True)
class RolloutOfRunConfig(Section):
    """The number of answers that a run samples in all."""

    total_rollout_steps: int | None = key(
        None, "Prompts to train on in all, in whole steps, instead of trainer.total_training_steps.", minimum=1
    )


def is_asynchronous(config: "RunConfig") -> bool:
    """Whether answers are sampled across publishes; with a staleness of 0 none is, and the steps are those of sync."""
    return config.trainer.v1.trainer_mode != SYNC


def staleness(config: "RunConfig") -> float:
    """Mean age of the answers when they are trained, in versions."""
    v1, given = config.trainer.v1, config.async_training.staleness_threshold
    mode = v1.separate_async if v1.trainer_mode == SEPARATE else v1.colocate_async
    return float(mode.num_warmup_batches) if given is None else given


def check_ages(mean: float, largest: int) -> None:
    """ConfigError where the largest age leaves no room beside the mean."""
    if mean > 0 and largest < mean + 1:
        raise ConfigError(
            f"trainer.v1.sampler.max_off_policy_threshold={largest} versions must be at least 1 above the mean age "
            f"staleness={mean:g}: set it to {math.ceil(mean + 1)} or more"
        )


def keeps_cache(config: "RunConfig") -> bool:
    """Whether answers that are unfinished at a publish go on with their keys and values of the weights before it."""
    kept = config.actor_rollout_ref.rollout.kv_cache_on_publish == "keep_kv"
    return kept and is_asynchronous(config) and staleness(config) > 0


def check_asynchronous(config: "RunConfig") -> None:
    """ConfigError for settings that have no effect in a synchronous run, or would give wrong old log-probs."""
    if not is_asynchronous(config):
        for name in ("staleness_threshold", "trigger_parameter_sync_step", "require_batches"):
            if value := config.async_training[name]:
                raise ConfigError(
                    f"async_training.{name}={value:g} has no effect with trainer.v1.trainer_mode=sync; set "
                    f"trainer.v1.trainer_mode={COLOCATED} or {SEPARATE}, or leave it out"
                )
        return
    _check_devices(config)
    if config.algorithm.filter_groups.max_inflight_gen_batches != 1 and staleness(config):
        raise ConfigError(
            "algorithm.filter_groups.max_inflight_gen_batches="
            f"{config.algorithm.filter_groups.max_inflight_gen_batches} has no effect in asynchronous training, where "
            "the staleness says how many prompts are under way; drop it"
        )
    check_ages(staleness(config), config.trainer.v1.sampler.max_off_policy_threshold)
    if not staleness(config):
        return
    if not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ConfigError(
            "actor_rollout_ref.rollout.calculate_log_probs=False leaves answers of older weights without old "
            "log-probs; set it to True, or async_training.staleness_threshold=0"
        )


def _check_devices(config: "RunConfig") -> None:
    """ConfigError where the mode does not fit the devices of the rollout, or the mini-batches of a publish."""
    arr, mode = config.actor_rollout_ref, config.trainer.v1.trainer_mode
    own = not arr.hybrid_engine or arr.rollout.nnodes > 0
    if mode == COLOCATED and own:
        raise ConfigError(
            f"trainer.v1.trainer_mode={COLOCATED} trains and samples on the same devices, and the rollout has its own "
            f"(actor_rollout_ref.hybrid_engine={arr.hybrid_engine}, rollout.nnodes={arr.rollout.nnodes}); set "
            f"trainer.v1.trainer_mode={SEPARATE}, or actor_rollout_ref.hybrid_engine=True and rollout.nnodes=0"
        )
    if mode == SEPARATE and not own:
        raise ConfigError(
            f"trainer.v1.trainer_mode={SEPARATE} needs devices of its own for the rollout; set "
            "actor_rollout_ref.hybrid_engine=False and actor_rollout_ref.rollout.n_gpus_per_node (with "
            f"rollout.nnodes=N, those of N machines), or trainer_mode={COLOCATED}"
        )
    for name, steps in _mini_batches_a_publish(config).items():
        batch, mini = config.data.train_batch_size, arr.actor.ppo_mini_batch_size
        if steps * mini != batch:
            raise ConfigError(
                f"{name}={steps} x actor.ppo_mini_batch_size={mini} is not data.train_batch_size={batch}, the prompts "
                f"of a publish; set data.train_batch_size={steps * mini}, or leave {name} out"
            )


def _mini_batches_a_publish(config: "RunConfig") -> dict[str, int]:
    """How many each of the keys asks for that says so."""
    own, fully = config.trainer.v1.separate_async.parameter_sync_step, config.async_training
    asked = {} if own is None else {"trainer.v1.separate_async.parameter_sync_step": own}
    if (steps := fully.trigger_parameter_sync_step) is not None or fully.require_batches is not None:
        name = "async_training.trigger_parameter_sync_step x require_batches"
        asked[name] = (steps or 1) * (fully.require_batches or 1)
    return asked
