"""Checks of a configuration: values, combinations of keys, and features that are still to come."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from verl.config import foreign_keys, schema
from verl.config.actor import FORWARD_BATCHING_KEYS, LOG_PROB_BATCHING_KEYS, PPO_BATCHING_KEYS, ActorConfig
from verl.config.asynchronous import check_asynchronous
from verl.config.distillation import teachers
from verl.config.model import HFModelConfig
from verl.config.no_effect import value_at
from verl.config.preference import PreferenceConfig
from verl.config.reward import check_reward_model
from verl.config.run_config import FOLLOWS, RunConfig
from verl.config.sft import SFTConfig
from verl.config.user_keys import with_value
from verl.config.value_rules import check_value
from verl.utils.errors import MISTAKES, ConfigError, Mistakes

NO_MODEL = (
    "model.path is not set; give the folder of a model (config.json, *.safetensors, tokenizer): "
    "actor_rollout_ref.model.path=DIR, or model.path=DIR in fine-tuning"
)


def check(config: Any, combinations: bool = True) -> None:
    """One ConfigError for all values out of range; without any, and with `combinations`, for all that cannot work."""
    root: type = type(config)
    mistakes, wrong = Mistakes(), set()
    for path, key in schema.keys(root).items():
        value = value_at(config, path)
        if key.follows in wrong and value == value_at(config, key.follows):
            continue  # the same mistake
        wrong.add(path)
        with mistakes:
            check_value(path, path.rsplit(".", 1)[-1], value)
            wrong.discard(path)
    mistakes.raise_if_any(MISTAKES)
    if not combinations:
        return
    if isinstance(config, RunConfig):
        for rule in (
            _check_aliases_agree,
            _check_prompts_per_step,
            _check_token_budgets,
            _check_rollout,
            _check_algorithm,
            _check_engines,
            _check_run,
            check_asynchronous,
        ):
            with mistakes:
                rule(config)
    elif isinstance(config, SFTConfig):
        _check_sft(config)
    mistakes.raise_if_any(MISTAKES)


def check_values_can_start(config: Any) -> None:
    """ConfigError for a value that is refused for good, or that needs a feature still to come."""
    root: type = type(config)
    foreign = foreign_keys.load_foreign_keys(root)
    for path, reasons in foreign.refused_values.items():
        setting = value_at(config, path)
        for value in setting if isinstance(setting, list) else [setting]:
            if value in reasons:
                raise ConfigError(f"{path}={value} is refused: {reasons[value]}")
    for path, values in foreign.planned.items():
        setting = value_at(config, path)
        for value in setting if isinstance(setting, list) else [setting]:
            for rule, feature in values.items():
                if (
                    foreign_keys.same(value, rule)
                    or (rule == "any" and value is not None)
                    or (isinstance(rule, str) and rule.startswith("> ") and (value or 0) > int(rule[2:]))
                ):
                    raise ConfigError(foreign_keys.not_yet_supported_message(f"{path}={value}", feature))


def check_can_start(config: Any) -> None:
    """ConfigError where a run cannot start: a feature still to come, no micro-batch size, no model, no tokenizer."""
    check_values_can_start(config)
    if isinstance(config, RunConfig):
        _check_micro_batches(config)
        teachers(config.distillation)
        tokenizer = config.data.tokenizer
        if tokenizer is not None and not Path(tokenizer).expanduser().is_dir():
            raise ConfigError(f"data.tokenizer={tokenizer} is not a folder; give one with a tokenizer, or null")
    model = config.actor_rollout_ref.model if isinstance(config, RunConfig) else config.model
    if not model.path:
        raise ConfigError(NO_MODEL)


def uses_critic(config: RunConfig) -> bool:
    """Whether the run trains a critic: `critic.enable`, or by default with gae."""
    enable = config.critic.enable
    return config.algorithm.adv_estimator == "gae" if enable is None else enable


def replaces_groups(config: RunConfig) -> bool:
    """Whether groups that cannot be trained on are replaced by others."""
    return config.algorithm.filter_groups.enable or config.trainer.v1.sampler.sync_refill_failed_groups


def uses_reference(config: RunConfig) -> bool:
    """Whether a KL term needs the reference policy."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def actor_is_reference(config: RunConfig) -> bool:
    """Whether the actor's engine without its adapters is the reference: with LoRA, on the same ranks."""
    arr = config.actor_rollout_ref
    return has_adapters(arr.model) and arr.ref.n_gpus_per_node is None


def trained_actor(config: RunConfig) -> ActorConfig:
    """The actor's section with the policy loss that it is trained with: in bypass mode that is bypass_mode."""
    actor = config.actor_rollout_ref.actor
    if not config.algorithm.rollout_correction.bypass_mode:
        return actor
    return with_value(actor, "policy_loss", with_value(actor.policy_loss, "loss_mode", "bypass_mode"))


def _check_aliases_agree(config: RunConfig) -> None:
    """A key of an engine and its short spelling beside the engine must agree where both are set."""
    set_keys = set(getattr(config, "_set", ()))
    for long, short in FOLLOWS.items():
        where, _, name = short.rpartition(".")
        same = long.startswith(f"{where}.") and long.endswith(f".{name}") and {long, short} <= set_keys
        if same and (one := value_at(config, short)) != (other := value_at(config, long)):
            raise ConfigError(f"{short}={one} and {long}={other} say the same thing differently; keep only {long}")


def _check_prompts_per_step(config: RunConfig) -> None:
    """A mini-batch at most the batch, generation batches that fill it, ranks that divide it evenly; ConfigError."""
    data, actor = config.data, config.actor_rollout_ref.actor
    if data.train_batch_size < 1:
        raise ConfigError(
            "data.train_batch_size=0 must be at least 1, except with async_training.trigger_parameter_sync_step, which "
            "gives the prompts of a step"
        )
    trained = [("actor_rollout_ref.actor", actor)] + ([("critic", config.critic)] if uses_critic(config) else [])
    for role, part in trained:
        if part.ppo_mini_batch_size > data.train_batch_size:
            raise ConfigError(
                f"{role}.ppo_mini_batch_size={part.ppo_mini_batch_size} is larger than "
                f"data.train_batch_size={data.train_batch_size}; a step has too few prompts for one mini-batch"
            )
    together, replaces = data.gen_batch_size or data.train_batch_size, replaces_groups(config)
    if data.train_batch_size % together and not (replaces and together % data.train_batch_size == 0):
        more = "; with algorithm.filter_groups.enable=True it may also be a multiple of it"
        raise ConfigError(
            f"data.train_batch_size={data.train_batch_size} is not a multiple of data.gen_batch_size={together}"
            + more * (not replaces)
        )
    check_batch_divides(config, config.trainer.nnodes * (config.trainer.n_gpus_per_node or 1))


def check_batch_divides(config: RunConfig, devices: int) -> None:
    """ConfigError where `devices` devices cannot divide the sequences of a training step evenly."""
    data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    for old, target in getattr(config, "_undivided_totals", {}).items():
        if devices > config.trainer.nnodes:
            raise ConfigError(
                f"{old} is shared by all devices, but their number was not given and {devices} were found; set "
                f"trainer.n_gpus_per_node={devices // config.trainer.nnodes}, or {target}"
            )
    trained: list[tuple[str, Any, int]] = [("actor_rollout_ref.actor", actor, devices)]
    if uses_critic(config) and config.critic.n_gpus_per_node is not None:
        trained.append(("critic", config.critic, config.trainer.nnodes * config.critic.n_gpus_per_node))
    for role, part, count in trained:
        ranks = max(count // part.engine.ranks_per_data_group, 1)
        unit, of_critic = ranks // math.gcd(ranks, rollout.n), " of the critic" if role == "critic" else ""
        for path, prompts in (
            ("data.train_batch_size", data.train_batch_size),
            (f"{role}.ppo_mini_batch_size", part.ppo_mini_batch_size),
        ):
            if (total := prompts * rollout.n) % ranks:
                raise ConfigError(
                    f"{path}={prompts} x rollout.n={rollout.n} = {total} sequences cannot be shared by {ranks} "
                    f"data-parallel ranks{of_critic}; set {path}={max(round(prompts / unit), 1) * unit}, "
                    f"or a multiple of {unit}"
                )


class _Pass(NamedTuple):
    """A pass over the batch in a step, and how it is cut into micro-batches."""

    role: str
    section: Any
    dynamic_key: str
    micro_batch_key: str
    budget_key: str
    ranks_per_sequence: int


def _passes(config: RunConfig) -> Iterator[_Pass]:
    """Every pass of a step."""
    arr, critic = config.actor_rollout_ref, config.critic
    sp_size = arr.actor.engine.ranks_per_sequence
    yield _Pass("actor_rollout_ref.actor", arr.actor, *PPO_BATCHING_KEYS, sp_size)
    yield _Pass("actor_rollout_ref.rollout", arr.rollout, *LOG_PROB_BATCHING_KEYS, sp_size)
    if uses_reference(config):
        ref_sp_size = sp_size if actor_is_reference(config) else arr.ref.engine.ranks_per_sequence
        yield _Pass("actor_rollout_ref.ref", arr.ref, *LOG_PROB_BATCHING_KEYS, ref_sp_size)
    if config.distillation.enabled:  # a teacher runs like a reference
        yield _Pass("actor_rollout_ref.ref", arr.ref, *LOG_PROB_BATCHING_KEYS, arr.ref.engine.ranks_per_sequence)
    if uses_critic(config):
        for keys in (PPO_BATCHING_KEYS, FORWARD_BATCHING_KEYS):
            yield _Pass("critic", critic, *keys, critic.engine.ranks_per_sequence)


def has_adapters(model: HFModelConfig) -> bool:
    """Whether LoRA adapters are trained instead of the whole model."""
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def _check_token_budgets(config: RunConfig) -> None:
    data = config.data
    max_length = data.max_prompt_length + data.max_response_length
    for role, part, flag, _, budget, sp_size in _passes(config):
        if part[flag] and part[budget] * sp_size < max_length:
            raise ConfigError(
                f"{role}.{budget}={part[budget]} is too small for a sequence of "
                f"data.max_prompt_length={data.max_prompt_length} + max_response_length={data.max_response_length} = "
                f"{max_length} tokens; raise it to {max_length} or more"
            )


def _check_micro_batches(config: RunConfig) -> None:
    for role, part, flag, micro, *_ in _passes(config):
        if not part[flag] and part[micro] is None:
            raise ConfigError(f"{role}.{flag}=False needs {role}.{micro}; set it, or {role}.{flag}=True")


def _check_rollout(config: RunConfig) -> None:
    rollout = config.actor_rollout_ref.rollout
    where, max_length = "actor_rollout_ref.rollout", rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < max_length:
        raise ConfigError(
            f"{where}.max_model_len={rollout.max_model_len} is shorter than prompt_length={rollout.prompt_length} + "
            f"response_length={rollout.response_length} = {max_length}"
        )
    if not rollout.enable_chunked_prefill and rollout.max_num_batched_tokens < rollout.prompt_length:
        raise ConfigError(
            f"{where}.max_num_batched_tokens={rollout.max_num_batched_tokens} cannot take a prompt of "
            f"{rollout.prompt_length} tokens without enable_chunked_prefill"
        )
    if rollout.temperature <= 0:
        raise ConfigError(f"{where}.temperature={rollout.temperature} must be above 0; greedy is do_sample=False")
    if rollout.val_kwargs.temperature < 0:
        raise ConfigError(f"{where}.val_kwargs.temperature={rollout.val_kwargs.temperature} must not be negative")
    if rollout.min_tokens > rollout.response_length:
        raise ConfigError(f"{where}.min_tokens={rollout.min_tokens} exceeds response_length={rollout.response_length}")
    tp_times_dp = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if rollout.expert_parallel_size not in (1, tp_times_dp):
        raise ConfigError(
            f"{where}.expert_parallel_size={rollout.expert_parallel_size} must be 1 or {tp_times_dp} (TP x DP)"
        )
    if rollout.pipeline_model_parallel_size > 1:
        raise ConfigError(f"{where}.pipeline_model_parallel_size={rollout.pipeline_model_parallel_size} must be 1")


def _check_algorithm(config: RunConfig) -> None:
    algorithm, actor = config.algorithm, config.actor_rollout_ref.actor
    if algorithm.adv_estimator == "gae" and config.critic.enable is False:
        raise ConfigError("algorithm.adv_estimator=gae needs values, but critic.enable=False; enable it or use grpo")
    if algorithm.use_pf_ppo and algorithm.adv_estimator != "gae":
        raise ConfigError(
            "algorithm.use_pf_ppo=True draws answers again for the estimator gae only, and algorithm.adv_estimator="
            f"{algorithm.adv_estimator}; set algorithm.adv_estimator=gae, or algorithm.use_pf_ppo=False"
        )
    _check_filter_groups(config)
    _check_gdpo_weights(config)
    check_reward_model(config.reward)
    correction, where = algorithm.rollout_correction, "algorithm.rollout_correction"
    correction.check_thresholds()
    if actor.policy_loss.loss_mode == "bypass_mode" and not correction.bypass_mode:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode needs {where}.bypass_mode=True, which takes "
            "the rollout's log-probs as the old ones; set it, or another loss_mode"
        )
    used = [name for name in ("bypass_mode", "rollout_is", "rollout_rs") if correction[name]]
    if used and not config.actor_rollout_ref.rollout.calculate_log_probs:
        raise ConfigError(
            f"{where}.{used[0]}={correction[used[0]]} needs the rollout's log-probs, but actor_rollout_ref.rollout."
            "calculate_log_probs=False; set it to True"
        )
    if actor.policy_loss.loss_mode == "dro" and not (actor.policy_loss.dro_beta or 0) > 0:
        raise ConfigError("actor_rollout_ref.actor.policy_loss.loss_mode=dro needs policy_loss.dro_beta above 0")


def _check_filter_groups(config: RunConfig) -> None:
    metric, key = config.algorithm.filter_groups.metric, "algorithm.filter_groups.metric"
    if not config.algorithm.filter_groups.enable:
        return
    if not metric:
        raise ConfigError(f"algorithm.filter_groups.enable=True needs {key}, e.g. acc")
    if config.actor_rollout_ref.rollout.n == 1:
        raise ConfigError(
            "algorithm.filter_groups.enable=True compares the answers to one prompt, and "
            "actor_rollout_ref.rollout.n=1; set n to 2 or more"
        )
    if metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        raise ConfigError(
            f"{key}=seq_final_reward with algorithm.use_kl_in_reward=True: the KL penalty is not known while prompts "
            "are replaced; use seq_reward"
        )


def _check_gdpo_weights(config: RunConfig) -> None:
    names, numbers = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if numbers is not None and len(numbers) != len(names or ()):
        raise ConfigError(
            f"algorithm.gdpo_reward_weights={numbers} has {len(numbers)} numbers for the {len(names or ())} parts of "
            f"algorithm.gdpo_reward_keys={names}; give one each, or null"
        )
    parts = dict(zip(names or (), numbers or [1.0] * len(names or ()), strict=True))
    if parts != config.reward.weights:
        raise ConfigError(
            f"reward.weights={config.reward.weights} and algorithm.gdpo_reward_keys={names} with gdpo_reward_weights="
            f"{numbers} say the same thing differently; keep only reward.weights"
        )


def _check_engines(config: RunConfig) -> None:
    arr = config.actor_rollout_ref
    engine = config.model_engine
    for role, part, model in (
        ("actor_rollout_ref.actor", arr.actor, arr.model),
        ("actor_rollout_ref.ref", arr.ref, arr.model),
        ("critic", config.critic, config.critic.model),
    ):
        if engine != "dp" and part.strategy != engine:
            raise ConfigError(f"model_engine={engine} and {role}.strategy={part.strategy} disagree; drop one of them")
        part.engine.check(model)


def _check_adapters(prefix: str, model: HFModelConfig) -> None:
    """Modules chosen for adapters must not be passed over because there are no adapters."""
    if has_adapters(model):
        return
    for name, default in (("target_modules", "all-linear"), ("exclude_modules", None)):
        if model[name] != default:
            raise ConfigError(
                f"{prefix}.{name}={model[name]} chooses modules for adapters, but {prefix}.lora_rank=0 trains the "
                f"whole model; set {prefix}.lora_rank above 0, or drop {prefix}.{name}"
            )


def _check_run(config: RunConfig) -> None:
    _check_adapters("actor_rollout_ref.model", config.actor_rollout_ref.model)
    _check_adapters("critic.model", config.critic.model)
    tokenizer, own = config.data.tokenizer, config.actor_rollout_ref.model.tokenizer_path
    if tokenizer is not None and tokenizer != own:
        raise ConfigError(
            f"data.tokenizer={tokenizer} and actor_rollout_ref.model.tokenizer_path={own} name two tokenizers; a run "
            "has one: keep only one of the keys"
        )
    _check_resume(config.trainer.resume_mode, config.trainer.resume_from_path)
    custom = config.data.custom_cls
    if bool(custom.path) != bool(custom.name):
        raise ConfigError(f"data.custom_cls needs both path and name; found path={custom.path}, name={custom.name}")
    if config.trainer.val_only and not config.data.val_files:
        raise ConfigError("trainer.val_only=True needs data.val_files")
    arr = config.actor_rollout_ref
    for path, role in (("actor", arr.actor), ("ref", arr.ref), ("rollout", arr.rollout), ("critic", config.critic)):
        role.profiler.check(f"{'' if path == 'critic' else 'actor_rollout_ref.'}{path}.profiler")


def _check_resume(mode: str, path: str | None) -> None:
    if mode == "resume_path" and not (path and "global_step_" in path):
        raise ConfigError(
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path=.../global_step_N; it is {path}"
        )


def _check_sft(config: SFTConfig) -> None:
    _check_adapters("model", config.model)
    _check_resume(config.trainer.resume_mode, config.trainer.resume_from_path)
    data, engine = config.data, config.training_engine
    budget = data.max_token_len_per_gpu * engine.ranks_per_sequence
    is_pair = isinstance(config, PreferenceConfig)
    needed, what = (2 * data.max_length, "two sequences") if is_pair else (data.max_length, "a sequence")
    if data.use_dynamic_bsz and budget < needed:
        raise ConfigError(
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} is too small for {what} of "
            f"data.max_length={data.max_length} tokens; raise it to {needed} or more"
        )
    if is_pair and data.custom_cls.path:
        raise ConfigError(
            f"data.custom_cls.path={data.custom_cls.path} is for fine-tuning; pairs are read from files with the "
            "columns prompt, chosen and rejected"
        )
    engine.check(config.model)
    if len(config.trainer.profile_interval) != 2:
        raise ConfigError(f"trainer.profile_interval={config.trainer.profile_interval} must be [first, last]")
    config.profiler.check("profiler")
