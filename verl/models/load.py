"""Loads models and tokenizers from a local folder: never from the network, never with code from the folder."""

import contextlib
import copy
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from verl.config import HFModelConfig
from verl.data.chat import check_template_ends
from verl.models.attention.packed import PACKED_ATTENTION
from verl.models.config_overrides import difference, overridden
from verl.models.folder_checks import (
    WITHOUT_CONFIG,
    check_config,
    check_not_quantised,
    check_readable_weights,
    check_weight_files,
    check_weights,
    end_tokens,
    instead,
    listing,
)
from verl.models.model_place import existing_folder, model_in_checkpoint
from verl.models.registry import check_router, family_of, make_packed
from verl.plugin.library_versions import give_weights_one_dtype
from verl.utils.cores import num_cores
from verl.utils.errors import CheckpointError, ConfigError

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "float64": torch.float64,
}
TEXT_PARTS = ("text_config", "decoder", "generator", "text_encoder")  # where `transformers` keeps a language model
# Weights of an image-text model that its text part does not load, and how its other names are mapped.
NON_TEXT_PREFIXES = ("vision_tower.", "vision_model.", "multi_modal_projector.", "model.visual.", "mtp.")
TEXT_KEY_MAPPING = {r"^language_model\.(model|lm_head)\.": r"\1.", r"^model\.language_model\.": "model."}


def dtype_of(name: str, key: str) -> torch.dtype:
    """The torch dtype that a configuration value names."""
    if name not in DTYPES:
        raise ConfigError(f"{key}={name!r} is not a type; use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def load_config(path: str | Path) -> PreTrainedConfig:
    """The configuration in a folder; of an image-text model the text part's, if that is a language model of its own."""
    config = _language_config(_whole_config(path, {}))
    check_config(config, f"{path}/config.json")
    return config


def _whole_config(path: str | Path | None, override: dict[str, Any]) -> PreTrainedConfig:
    """The configuration in a folder with `override` on top, which may be of the language model in it alone."""
    whole = read_config(folder := model_folder(path))
    text = _language_config(whole)
    part = next((name for name in TEXT_PARTS if text is not whole and getattr(whole, name, None) is text), None)
    if not override:
        return whole
    if part is not None:
        override = {part: {n: v for n, v in override.items() if n != part} | override.get(part, {})}
    return overridden(whole, type(whole).get_config_dict(folder, local_files_only=True)[0], override)


def _language_config(whole: PreTrainedConfig) -> PreTrainedConfig:
    text = whole.get_text_config()
    return text if type(text) in AutoModelForCausalLM._model_mapping else whole


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in a folder's config.json; ConfigError if that is no model `transformers` knows."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library checks values in its own ways, divisions by zero among them
        refuse_own_code(folder / "config.json", error)
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(
            f"{folder / 'config.json'} cannot be used: {type(error).__name__}: {reason}; take the model's own"
        ) from error


def refuse_own_code(file: Path, error: Exception) -> None:
    """ConfigError if `error` arose because `file` needs Python files of its folder (its `auto_map`)."""
    if "trust_remote_code" in str(error) and file.is_file():
        raise ConfigError(
            f"{file} needs code of its own folder (auto_map), which is never run, whatever trust_remote_code says; use "
            "a model that transformers has, or register its classes in a module that model.external_lib names"
        ) from error


def build_config(model: HFModelConfig) -> tuple[PreTrainedConfig, bool]:
    """(configuration, whether to initialise the weights randomly) from `model.*`.

    Dropout and the jitter of routers are off unless `override_config` sets them: an update needs the log-probs of the
    policy that sampled.
    """
    attention = model.override_config.get("attn_implementation")
    if attention not in (None, PACKED_ATTENTION, "sdpa", "flash_attention_2", "flash_attention_3"):
        raise ConfigError(
            f"model.override_config.attn_implementation={attention!r} is not used: packed models attend through "
            f"{PACKED_ATTENTION}, which picks the best kernel of the device. Leave it out"
        )
    folder, override = model.hf_config_path or model.path, _override_of(model)
    config = _language_config(_whole_config(folder, override))
    asked = {*override, *(name for part in override.values() if isinstance(part, dict) for name in part)}
    for name, value in config.to_dict().items():
        if name.endswith(("dropout", "_pdrop", "jitter_noise")) and isinstance(value, float) and name not in asked:
            setattr(config, name, 0.0)
    check_config(config, f"{folder}/config.json{' with model.override_config' if override else ''}")
    check_router(config)
    return config, bool(model.override_config.get("init_random", False))


def _override_of(model: HFModelConfig) -> dict[str, Any]:
    """Overrides of values in config.json, also those under `model_config`, as the reference system nests them."""
    flat = {**model.override_config, **model.override_config.get("model_config", {})}
    return {n: v for n, v in flat.items() if n not in ("model_config", "init_random", "attn_implementation")}


def changed_config(model: HFModelConfig) -> dict[str, Any]:
    """The values by which the trained model's configuration differs from config.json in `model.path`, for whoever reads
    that file: a rollout engine."""
    folder, override = model.hf_config_path or model.path, _override_of(model)
    if not override and folder == model.path:
        return {}
    return difference(_whole_config(model.path, {}), _whole_config(folder, override))


def model_folder(path: str | Path | None) -> Path:
    """`path` as a folder with a config.json, or an error that says what is missing."""
    folder = existing_folder(path, "path")
    if not (folder / "config.json").is_file():
        if (inner := model_in_checkpoint(folder)) is not None:
            raise ConfigError(f"model.path={path} holds checkpoints; the model in it is model.path={inner}")
        raise ConfigError(
            f"model.path={path} has no config.json; found: {listing(folder)}: {instead(folder, WITHOUT_CONFIG)}"
        )
    return folder


def load_causal_lm(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    config: PreTrainedConfig | None = None,
    init_random: bool = False,
    structure_only: bool = False,
) -> PreTrainedModel:
    """A causal LM in eval mode on the CPU, with packed attention if its family has been tested with it.

    Weights come from the folder; a missing tensor is an error. `init_random` initialises them randomly instead.
    With `structure_only` nothing is read and every tensor is on the meta device.
    """
    config = config if config is not None else load_config(path)
    return _load(AutoModelForCausalLM, path, config, dtype, init_random, structure_only, optional_prefixes=())


def load_value_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    config: PreTrainedConfig | None = None,
    init_random: bool = False,
    structure_only: bool = False,
) -> PreTrainedModel:
    """The backbone of a model with a head of one value per token, `score` (1, D).

    From a language model the head starts at zero, so the first values are 0; from our own critic the head is read.
    """
    return _load_scorer(AutoModelForTokenClassification, path, dtype, config, init_random, structure_only)


def load_reward_model(
    path: str | Path,
    dtype: torch.dtype = torch.float32,
    config: PreTrainedConfig | None = None,
    init_random: bool = False,
    structure_only: bool = False,
) -> PreTrainedModel:
    """A model for sequence classification with one label: its head `score` (1, D) reads the last token.

    From a language model the head starts at zero, so the first scores are 0; from a reward model the head is read.
    """
    return _load_scorer(AutoModelForSequenceClassification, path, dtype, config, init_random, structure_only)


def _load_scorer(
    auto_class: Any,
    path: str | Path,
    dtype: torch.dtype,
    config: PreTrainedConfig | None,
    init_random: bool,
    structure_only: bool,
) -> PreTrainedModel:
    config = config if config is not None else load_config(path)
    config.num_labels = 1
    config.classifier_dropout = 0.0
    return _load(auto_class, path, config, dtype, init_random, structure_only, optional_prefixes=("score.",))


def _load(
    auto_class: Any,
    path: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    init_random: bool,
    structure_only: bool,
    optional_prefixes: tuple[str, ...],
) -> PreTrainedModel:
    limit_threads()
    folder = model_folder(path)
    if type(config) not in auto_class._model_mapping:
        raise ConfigError(
            f"model family {config.model_type!r} of {folder} has no {auto_class.__name__} in transformers"
        )
    if optional_prefixes and not isinstance(getattr(_meta_model(auto_class, config, dtype), "score", None), nn.Linear):
        raise ConfigError(f"model family {config.model_type!r} has no linear head named score; it can score nothing")
    if structure_only:
        model, missing = _meta_model(auto_class, config, dtype), []
    else:
        try:
            if init_random:
                model, missing = auto_class.from_config(config, dtype=dtype), list(optional_prefixes)
            else:
                model, missing = _read_weights(auto_class, folder, config, dtype, optional_prefixes)
        except (RuntimeError, MemoryError, AssertionError, TypeError) as error:  # sizes that nobody has memory for
            reason = " ".join(str(error).split())[:300]
            raise ConfigError(f"no model can be made of {folder}: {type(error).__name__}: {reason}") from error
    give_weights_one_dtype(model, dtype)
    if missing and optional_prefixes:
        for parameter in model.score.parameters():
            nn.init.zeros_(parameter)
    if not family_of(model.config).padded_because:
        make_packed(model)  # also for padded runs: the library's own attention may drop soft caps and sinks
    return model.eval()


def limit_threads() -> None:
    """Compute with no more threads than this process has cores, unless OMP_NUM_THREADS says how many: torch by itself
    knows no limit but its affinity."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), num_cores()))


def _meta_model(auto_class: Any, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device."""
    with torch.device("meta"):
        return auto_class.from_config(copy.deepcopy(config), dtype=dtype)


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Suppress the library's progress bars and its report on loaded names, which we turn into errors."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    loggers = [logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "utils.loading_report")]
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.addFilter(_is_no_load_report)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_no_load_report)
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


@no_progress_bars()
def _read_weights(
    auto_class: Any, folder: Path, config: PreTrainedConfig, dtype: torch.dtype, optional_prefixes: tuple[str, ...]
) -> tuple[PreTrainedModel, list[str]]:
    check_readable_weights(folder)
    check_not_quantised(folder)
    check_weight_files(folder, config)
    model, info = auto_class.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        local_files_only=True,
        use_safetensors=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # all of them are reported below
        key_mapping=TEXT_KEY_MAPPING,
    )
    missing = sorted(info["missing_keys"])
    ignored_prefixes = (*NON_TEXT_PREFIXES, *(("lm_head.",) if optional_prefixes else ()))
    wrong = [f"{name} is missing" for name in missing if not name.startswith(optional_prefixes or "\0")]
    wrong += [f"{name} is {tuple(got)}, not {tuple(want)}" for name, got, want in info.get("mismatched_keys", ())]
    wrong += [
        f"{name} has no place" for name in sorted(info["unexpected_keys"]) if not name.startswith(ignored_prefixes)
    ]
    if wrong:
        raise CheckpointError(
            f"{folder} does not fit {type(model).__name__}: {len(wrong)} tensors are missing, of another shape or left "
            f"over, first: {'; '.join(wrong[:3])}; config.json (with override_config) and the weights must be of the "
            "same model"
        )
    check_weights(model, folder)
    return model, missing


def load_tokenizer(model: HFModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; the end-of-sequence token replaces a missing padding token."""
    folder = existing_folder(model.tokenizer_path or model.path, "tokenizer_path" if model.tokenizer_path else "path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library's parsers raise whatever they meet
        refuse_own_code(folder / "tokenizer_config.json", error)
        if (folder / "config.json").is_file():  # the library reads it too: what is wrong there is said of it
            read_config(folder)
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
        raise ConfigError(
            f"{folder} holds no tokenizer that transformers can read ({reason}); set model.tokenizer_path to one"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # what the library returns for a folder without its files
        raise ConfigError(f"{folder} holds no tokenizer with a vocabulary; set model.tokenizer_path to one")
    if model.custom_chat_template is not None:
        tokenizer.chat_template = model.custom_chat_template
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    check_template_ends(tokenizer)
    return tokenizer


def describe_ends(model: HFModelConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokens that end an answer of a model, with their ids."""
    ends = end_tokens(build_config(model)[0], model_folder(model.path), tokenizer)
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in ends) or "at their length alone"
