"""Checks of the model, the engines and the algorithm of a run, once heavy libraries are loaded."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.algorithms.advantages import check_advantage, get_advantage
from verl.algorithms.distillation import check_distillation
from verl.algorithms.losses import get_policy_loss
from verl.algorithms.old_logprobs import keeps_published_weights
from verl.checks.findings import Findings
from verl.config import HFModelConfig, RunConfig
from verl.config.check import trained_actor, uses_critic, uses_reference
from verl.config.checkpoint import CheckpointConfig
from verl.config.distillation import requested_server_keys
from verl.config.engine import EngineConfig
from verl.data.columns import COLUMNS, REWARD_PART
from verl.models.folder_checks import check_model_for_run, check_readable_weights
from verl.models.load import build_config, dtype_of, load_tokenizer, model_folder
from verl.models.parameter_counts import stored_parameters
from verl.placement.memory import gigabytes
from verl.plugin.platform import PlatformBase, choose_platform
from verl.utils.errors import ConfigError, VerlError
from verl.utils.suggest import did_you_mean
from verl.workers.engine.base import BaseEngine, EngineRegistry


def find_device(device: str, found: Findings) -> PlatformBase | None:
    """The platform of `trainer.device`, where this machine has it."""
    return found.run("trainer.device", lambda: choose_platform(device), lambda p: f"{device}: {p.device_name}")


def check_weights_are_there(model: HFModelConfig) -> Path:
    """The folder of the model; ConfigError where it lacks its configuration or its weights."""
    folder = model_folder(model.path)
    if not model.override_config.get("init_random"):
        check_readable_weights(folder)
    return folder


def find_tokenizer(key: str, model: HFModelConfig, longest: int, length_keys: str, found: Findings) -> Any:
    """The tokenizer of the model at `key`; also what does not go together in model, tokenizer and lengths."""
    folder = found.run(key, lambda: check_weights_are_there(model))
    if folder is None and model.tokenizer_path is None:
        return None
    tokenizer = found.run("tokenizer", lambda: load_tokenizer(model), lambda t: f"{len(t)} tokens")
    if folder is not None and tokenizer is not None:
        config = found.run("model", lambda: build_config(model)[0], lambda c: str(c.model_type))
        if config is not None:
            fits = found.run(
                "lengths",
                lambda: check_model_for_run(config, folder, tokenizer, longest, length_keys),
                lambda _: f"{longest} tokens ({length_keys})",
            )
            for line in fits or ():
                found.warn("lengths", line)
    return tokenizer


@dataclass(frozen=True)
class TrainedModel:
    """One model that a run saves."""

    model: HFModelConfig
    engine: EngineConfig
    checkpoint: CheckpointConfig

    def checkpoint_bytes(self) -> int:
        """About the size of one checkpoint; 0 where the weights are not counted (random ones, adapters)."""
        if self.model.override_config.get("init_random") or self.model.lora_rank or self.model.lora_adapter_path:
            return 0
        contents = self.checkpoint.save_contents
        copies = ("model" in contents) + 2 * ("optimizer" in contents) + ("hf_model" in contents)
        size = dtype_of(self.engine.parameter_dtype.removeprefix("torch."), "model_dtype").itemsize
        return copies * size * stored_parameters(model_folder(self.model.path)).all


def warn_of_narrow_parameters(trained: list[TrainedModel], found: Findings) -> None:
    """A doubt where parameters are trained in fewer bits than small updates need; adapters are in float32."""
    for one in trained:
        name = one.engine.parameter_dtype
        adapts = one.model.lora_rank or one.model.lora_adapter_path
        if not adapts and dtype_of(name.removeprefix("torch."), "model_dtype").itemsize < 4:
            found.warn(
                "model_dtype",
                f"model_dtype={name} trains parameters in {name}: an update below about 1/256 of a parameter, as most "
                "are at lr 1e-6, is rounded away (the metric updates_lost says how many); model_dtype=fp32 with "
                "dtype=bf16 computes in bfloat16 and keeps every update; `verl plan` counts the memory",
            )


def check_disk_room(folder: str, trained: list[TrainedModel], keep: int | None, found: Findings) -> None:
    """Whether a checkpoint of the `trained` fits on the disk of `folder`; a doubt where `keep` of them may not."""
    place = Path(folder).expanduser().absolute()
    place = next(parent for parent in (place, *place.parents) if parent.is_dir())
    free = shutil.disk_usage(place).free
    try:
        needed = sum(map(TrainedModel.checkpoint_bytes, trained))
    except VerlError:  # of a folder that another check refuses
        return
    if not needed:
        return
    text = f"a checkpoint needs about {gigabytes(needed)}, {gigabytes(free)} are free at {place}"
    move = "make room, name another trainer.default_local_dir, or save less (checkpoint.save_contents)"

    def fits() -> str:
        if needed > free:
            raise ConfigError(f"{text}; {move}")
        return text

    if found.run("disk", fits) and keep and needed * (keep + 1) > free:
        found.warn("disk", f"{text}, but {keep} are kept while the next is written; {move}")


def check_engine_and_algorithm(config: RunConfig, found: Findings) -> None:
    """Training engine, advantage estimator and losses, after external_lib, which may register them."""
    actor = trained_actor(config)
    engine = found.run(
        "engine", lambda: EngineRegistry.get_engine_cls("language_model", actor.strategy), _engine_text(actor)
    )
    if engine is not None and keeps_published_weights(config):
        found.check("old log-probs", lambda: _check_keeps_weights(engine), "scored by the published weights, kept")
    name = config.algorithm.adv_estimator
    estimator_is_known = found.check("advantage estimator", lambda: check_advantage(config.algorithm), name)
    loss = actor.policy_loss.loss_mode
    if found.check("policy loss", lambda: get_policy_loss(loss).check(actor), loss):
        if estimator_is_known:
            found.check("columns", lambda: check_columns_are_filled(config))
        found.check("importance weights", lambda: check_importance_weights_are_used(config))
        found.check("rollout log-probs", lambda: check_rollout_logprobs(config))
        if notice := forced_loss_notice(config):
            found.warn("rollout correction", notice)
        if notice := forced_aggregation_notice(config):
            found.warn("loss_agg_mode", notice)
    if config.distillation.enabled:
        check_distillation_loss(config, found)


def _check_keeps_weights(engine: type[BaseEngine]) -> None:
    if not engine.can_keep_weights:
        raise ConfigError(
            f"the training engine {engine.__module__}.{engine.__name__} cannot keep the published weights beside those "
            "that it trains (can_keep_weights), by which trainer_mode=separate_async scores answers whose log-probs "
            "the rollout does not record; set algorithm.rollout_correction.bypass_mode=True, rollout.name=native with "
            "dtype=auto, top_p=1 and top_k=-1, or async_training.staleness_threshold=0"
        )


def _engine_text(actor: Any) -> Callable[[type], str]:
    return lambda engine: f"{actor.strategy}: {engine.__module__}.{engine.__name__}"


def check_distillation_loss(config: RunConfig, found: Findings) -> None:
    """The loss, after external_lib, which may register it."""
    loss = config.distillation.distillation_loss
    doubts = found.run(
        "distillation loss",
        lambda: check_distillation(loss, trained_actor(config)),
        lambda _: loss.loss_mode,
    )
    for text in doubts or ():
        found.warn("distillation loss", text)
    if servers := requested_server_keys(config.distillation):
        found.warn(
            "teachers",
            f"{', '.join(servers)} has no effect: teachers run on the actor's devices, with the settings of "
            "actor_rollout_ref.ref",
        )


def check_columns_are_filled(config: RunConfig) -> None:
    """ConfigError, before the first step, for a column that no stage of this run fills."""
    algorithm, loss_mode = config.algorithm, trained_actor(config).policy_loss.loss_mode
    correction = algorithm.rollout_correction
    asked = {
        f"algorithm.adv_estimator={algorithm.adv_estimator}": get_advantage(algorithm.adv_estimator).columns_for(
            algorithm
        ),
        f"actor_rollout_ref.actor.policy_loss.loss_mode={loss_mode}": get_policy_loss(loss_mode).columns,
    }
    switches = {
        "values": (uses_critic(config), "critic.enable=True"),
        "rollout_is_weights": (
            correction.weighs_loss and not correction.bypass_mode,
            "algorithm.rollout_correction.rollout_is=token, without bypass_mode",
        ),
        "ref_logprobs": (uses_reference(config), "actor_rollout_ref.actor.use_kl_loss=True"),
    }
    for who, columns in asked.items():
        for name in columns:
            if name not in COLUMNS and not name.startswith(REWARD_PART):
                raise ConfigError(f"{who} asks for a column {name!r} of the batch; {did_you_mean(name, COLUMNS)}")
            provided, switch = switches.get(name, (True, ""))
            if not provided:
                raise ConfigError(f"{who} needs the column {name!r}, which this run does not fill; set {switch}")


def check_importance_weights_are_used(config: RunConfig) -> None:
    """ConfigError for a padded loss that does not multiply by the importance weights that the run computes."""
    actor = trained_actor(config)
    correction, name = config.algorithm.rollout_correction, actor.policy_loss.loss_mode
    if correction.weighs_loss and get_policy_loss(name).ignores_weights(actor):
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_is={correction.rollout_is}, but the policy loss {name!r} "
            f"ignores its argument rollout_is_weights; multiply its losses by it, or set "
            "algorithm.rollout_correction.rollout_is=null"
        )


def check_rollout_logprobs(config: RunConfig) -> None:
    """ConfigError where the loss takes the rollout's log-probs, and the engine's are not those of the policy: the
    importance weights would be off by what sampling leaves out, though both have the same weights."""
    rollout, correction = config.actor_rollout_ref.rollout, config.algorithm.rollout_correction
    names = ["min_tokens"] if rollout.name == "sglang" else []
    if rollout.name == "vllm" and rollout.engine_kwargs.vllm.get("speculative_config"):
        names = ["top_p", "top_k", "min_tokens"]
    if rollout.name == "vllm" and rollout.logprobs_mode == "raw_logprobs" and rollout.do_sample:
        names = [*names, "temperature"]
    off = {"top_p": (1,), "top_k": (-1, 0), "min_tokens": (0,), "temperature": (1,)}
    wrong = [f"{name}={rollout[name]}" for name in names if rollout[name] not in off[name]]
    if wrong and (correction.bypass_mode or correction.corrects):
        raise ConfigError(
            f"actor_rollout_ref.rollout.{wrong[0]}: with it, the log-probs of rollout.name={rollout.name} are not the "
            "policy's (of SGLang's min_tokens, of vLLM's drafts and raw_logprobs), for which "
            "algorithm.rollout_correction takes them; leave out one of the two, or use rollout.name=native"
        )


def forced_loss_notice(config: RunConfig) -> str | None:
    """One line where bypass mode trains with another loss, or without the weights, that the configuration asks for."""
    correction, asked = config.algorithm.rollout_correction, config.actor_rollout_ref.actor.policy_loss.loss_mode
    if not correction.bypass_mode:
        return None
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    if asked not in ("vanilla", "bypass_mode"):
        return f"actor_rollout_ref.actor.policy_loss.loss_mode={asked} has no effect: {bypass} trains with bypass_mode"
    if correction.rollout_is is not None and not correction.weighs_loss:
        return (
            f"algorithm.rollout_correction.rollout_is={correction.rollout_is} has no effect: with {bypass} and "
            "loss_type=ppo_clip the ratio of the loss is the importance weight; loss_type=reinforce has weights"
        )
    return None


def forced_aggregation_notice(config: RunConfig) -> str | None:
    """One line where the policy loss is defined with another aggregation than `loss_agg_mode` asks for."""
    actor, key = trained_actor(config), "actor_rollout_ref.actor.loss_agg_mode"
    forced = get_policy_loss(actor.policy_loss.loss_mode).aggregation
    if forced in (None, actor.loss_agg_mode) or key not in getattr(config, "_set", ()):
        return None
    return (
        f"{key}={actor.loss_agg_mode} has no effect: policy_loss.loss_mode={actor.policy_loss.loss_mode} is defined "
        f"with {forced}"
    )
