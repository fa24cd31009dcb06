"""Defaults that depend on other keys, so that a small run needs few keys."""

import os
from typing import Any

from verl.config.run_config import RunConfig
from verl.config.run_name import dated_name
from verl.config.sft import SFTConfig

_ARR = "actor_rollout_ref"
_ENGINES = (
    *(f"{_ARR}.{role}.{section}" for role in ("actor", "ref") for section in ("fsdp_config", "veomni")),
    "critic.fsdp",
    "critic.veomni",
)
_DYNAMIC_BATCHING_KEYS = (
    (f"{_ARR}.actor.use_dynamic_bsz", f"{_ARR}.actor.ppo_micro_batch_size_per_gpu"),
    (f"{_ARR}.ref.log_prob_use_dynamic_bsz", f"{_ARR}.ref.log_prob_micro_batch_size_per_gpu"),
    (f"{_ARR}.rollout.log_prob_use_dynamic_bsz", f"{_ARR}.rollout.log_prob_micro_batch_size_per_gpu"),
    ("critic.use_dynamic_bsz", "critic.ppo_micro_batch_size_per_gpu"),
)


def derive(values: dict[str, Any], root: type) -> dict[str, tuple[Any, str]]:
    """Key -> (value, reason) for keys that are not set and whose default follows from keys that are set."""
    if issubclass(root, SFTConfig):
        return {**dated_name(values, root.run_name), **_determinism(values, ("engine",))}
    if root is not RunConfig:
        return {}
    algorithm = str(values.get("algorithm.adv_estimator", "gae"))
    name = dated_name(values, {"gae": "ppo"}.get(algorithm, algorithm if algorithm.isidentifier() else "rl"))
    return {
        **name,
        **_strategy(values),
        **_dynamic_batching(values),
        **_mini_batch(values),
        **_asynchronous(values),
        **_reward_weights(values),
        **_determinism(values, _ENGINES),
    }


def _determinism(values: dict[str, Any], engines: tuple[str, ...]) -> dict[str, tuple[Any, str]]:
    """Deterministic kernels in every engine where the environment asks for them."""
    if os.environ.get("VERL_FULL_DETERMINISM", "").lower() not in ("1", "true"):
        return {}
    keys = [f"{engine}.full_determinism" for engine in engines]
    return {path: (True, "derived: VERL_FULL_DETERMINISM is set") for path in keys if path not in values}


def _strategy(values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    engine, path = values.get("model_engine", "dp"), f"{_ARR}.actor.strategy"
    return {} if engine == "dp" or path in values else {path: (engine, f"derived: model_engine={engine}")}


def _dynamic_batching(values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Token budgets wherever no micro-batch size is set; reference verl refuses to start there."""
    result: dict[str, tuple[Any, str]] = {}
    actor_flag = _DYNAMIC_BATCHING_KEYS[0][0]
    for flag, micro in _DYNAMIC_BATCHING_KEYS:
        if flag in values or values.get(actor_flag) is True:
            continue
        if values.get(micro) is None:
            result[flag] = (True, f"derived: {micro} is not set")
        else:
            result[flag] = (False, f"derived: {micro} is set")
    return result


def _mini_batch(values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    path, batch = f"{_ARR}.actor.ppo_mini_batch_size", values.get("data.train_batch_size")
    if path in values or not isinstance(batch, int) or not 0 < batch < 256:
        return {}
    return {path: (batch, "derived: not more than data.train_batch_size")}


def _asynchronous(values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """Prompts of a step from the mini-batches of a publish, and steps from the prompts of the run."""
    asked = [values.get(f"async_training.{name}") for name in ("trigger_parameter_sync_step", "require_batches")]
    mini, batch = values.get(f"{_ARR}.actor.ppo_mini_batch_size", 256), values.get("data.train_batch_size")
    total, result = values.get("rollout.total_rollout_steps"), dict[str, tuple[Any, str]]()
    if any(asked) and not batch and all(isinstance(number, int | None) for number in (*asked, mini)):
        batch = (asked[0] or 1) * (asked[1] or 1) * mini
        why = "derived: async_training.trigger_parameter_sync_step x require_batches x ppo_mini_batch_size"
        result["data.train_batch_size"] = (batch, why)
    batch = 1024 if batch is None else batch
    if isinstance(total, int) and isinstance(batch, int) and "trainer.total_training_steps" not in values:
        steps = max(total // max(batch, 1), 1)
        result["trainer.total_training_steps"] = (steps, "derived: rollout.total_rollout_steps / train_batch_size")
    return result


def _reward_weights(values: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    """`reward.weights` and the two keys of gdpo say the same; those that are not set follow from those that are."""
    names, numbers, weights = "algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights", "reward.weights"
    by_name, keys, listed = values.get(weights) or {}, values.get(names), values.get(numbers)
    result: dict[str, Any] = {}
    if by_name and not keys:
        result[names] = keys = list(by_name)
    if isinstance(keys, list) and by_name and not listed and set(keys) == set(by_name):
        result[numbers] = [by_name[key] for key in keys]
    elif isinstance(keys, list) and not by_name and len(listed or keys) == len(keys):
        result[weights] = dict(zip(keys, listed or [1.0] * len(keys), strict=True))
    why = f"derived: {weights} is set" if by_name else f"derived: {names} is set"
    return {path: (value, why) for path, value in result.items()}
