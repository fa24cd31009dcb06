"""Asynchronous training: where answers are sampled while the policy is trained, and how old they may be."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl.config.base import Section, key, section
from verl.utils.errors import ConfigError

if TYPE_CHECKING:
    from verl.config.run_config import RunConfig

SYNC, COLOCATED = "sync", "colocate_async"
_MODE = (
    "sync: a step waits for all of its answers. colocate_async: a step takes the answers that are finished; the others "
    "are parked while the policy is trained on the same devices, and go on under the new weights."
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
class V1Config(Section):
    """Where trajectories come from."""

    trainer_mode: str = key(SYNC, _MODE, choices=(SYNC, COLOCATED, "separate_async"))
    sampler: SamplerConfig = section(SamplerConfig)
    colocate_async: ColocateAsyncConfig = section(ColocateAsyncConfig)


@dataclass(frozen=True, kw_only=True)
class AsyncTrainingConfig(Section):
    """How far the rollout may be ahead of the trainer."""

    staleness_threshold: float | None = key(None, _STALENESS, minimum=0.0)


def is_asynchronous(config: "RunConfig") -> bool:
    """Whether answers are sampled across publishes; with a staleness of 0 none is, and the steps are those of sync."""
    return config.trainer.v1.trainer_mode != SYNC


def staleness(config: "RunConfig") -> float:
    """Mean age of the answers when they are trained, in versions."""
    given = config.async_training.staleness_threshold
    return float(config.trainer.v1.colocate_async.num_warmup_batches) if given is None else given


def check_ages(mean: float, largest: int) -> None:
    """ConfigError where the largest age leaves no room beside the mean."""
    if mean > 0 and largest < mean + 1:
        raise ConfigError(
            f"trainer.v1.sampler.max_off_policy_threshold={largest} versions must be at least 1 above the mean age "
            f"staleness={mean:g}: set it to {math.ceil(mean + 1)} or more"
        )


def records_old_logprobs(config: "RunConfig") -> bool:
    """Whether the log-probs that the rollout records are those of the trainer at the version that sampled a token: it
    computes with the trainer's own weights, type and full vocabulary, and no keys and values of older weights."""
    rollout = config.actor_rollout_ref.rollout
    same_type = rollout.dtype in ("auto", config.actor_rollout_ref.actor.engine.get("dtype"))
    unlimited = rollout.top_p == 1 and rollout.top_k in (-1, 0)
    return rollout.name == "native" and same_type and unlimited and rollout.kv_cache_on_publish == "recompute"


def check_asynchronous(config: "RunConfig") -> None:
    """ConfigError for settings that have no effect in a synchronous run, or would give wrong old log-probs."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    if not is_asynchronous(config):
        if config.async_training.staleness_threshold:
            raise ConfigError(
                f"async_training.staleness_threshold={config.async_training.staleness_threshold:g} has no effect with "
                f"trainer.v1.trainer_mode=sync; set trainer_mode={COLOCATED}, or staleness_threshold=0"
            )
        return
    if config.algorithm.filter_groups.max_inflight_gen_batches != 1 and staleness(config):
        raise ConfigError(
            "algorithm.filter_groups.max_inflight_gen_batches="
            f"{config.algorithm.filter_groups.max_inflight_gen_batches} has no effect in asynchronous training, where "
            "the staleness says how many prompts are under way; drop it"
        )
    check_ages(staleness(config), config.trainer.v1.sampler.max_off_policy_threshold)
    if not staleness(config):
        return
    if not rollout.calculate_log_probs:
        raise ConfigError(
            "actor_rollout_ref.rollout.calculate_log_probs=False leaves answers of older weights without old "
            "log-probs; set it to True, or async_training.staleness_threshold=0"
        )
    if not records_old_logprobs(config) and not correction.bypass_mode:
        raise ConfigError(
            "the rollout's log-probs are not the trainer's of the same version (rollout.name="
            f"{rollout.name}, dtype={rollout.dtype}, top_p={rollout.top_p:g}, top_k={rollout.top_k}, "
            f"kv_cache_on_publish={rollout.kv_cache_on_publish}), so answers of older weights have no old log-probs; "
            "use name=native, dtype=auto, top_p=1, top_k=-1 and kv_cache_on_publish=recompute, or the rollout's own by "
            "algorithm.rollout_correction.bypass_mode=True"
        )
