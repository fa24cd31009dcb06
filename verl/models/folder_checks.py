"""Checks that a model folder agrees with itself before a run starts: configuration, tokenizer, index and weights."""

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from verl.data.chat import end_marks
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.suggest import did_you_mean

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
SIZES = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "sliding_window", "moe_intermediate_size", "kv_lora_rank", "q_lora_rank", "v_head_dim",
)  # fmt: skip
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # one family's name each
# What a number is that ends like this: (endings, low, high, whether they are allowed, how a message says so).
RANGES = (
    (("_eps", "_epsilon"), 0.0, 1.0, False, "a small number above 0, often 1e-6 or 1e-5"),
    (("initializer_range",), 0.0, math.inf, True, "a standard deviation of at least 0"),
    (("_softcapping", "query_pre_attn_scalar", "logit_scale", "logits_scaling", "attention_multiplier"), 0.0, math.inf,
     False, "a number above 0"),
)  # fmt: skip
FP8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
QUANTISED = ("quantization_config", "compression_config")  # keys of config.json
NOT_FLOATING = ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL")
WRITE_PLAIN = "python scripts/write_plain_model.py {folder} NEW_FOLDER"
TRANSFORMERS_OWN = "take the repository of this model that is made for transformers"
# What a folder may hold instead of a model: (pattern of a file, what it is, what to do about it).
ADAPTERS = ("adapter_config.json", "adapters, without their model",
            "give the folder of that model, and this one as model.lora_adapter_path")  # fmt: skip
GGUF = ("*.gguf", "a model as GGUF", f"take the original, or convert it: {WRITE_PLAIN} --gguf {{file}}")
NOTHING = ("*", "no whole model", "complete the download (hf download ORG/NAME; for a gated model first accept its "
           "terms on its page, then run hf auth login)")  # fmt: skip
WITHOUT_CONFIG = (ADAPTERS, GGUF, NOTHING)
WITHOUT_WEIGHTS = (
    ADAPTERS,
    (
        "model-*.safetensors",
        f"parts of the weights without {INDEX}, which lists them",
        "download the model again, whole",
    ),
    ("*.safetensors", "weights under a name that transformers does not read", TRANSFORMERS_OWN),
    GGUF,
    ("pytorch_model*.bin", "pickled weights", f"convert them: {WRITE_PLAIN}"),
    ("*.pth", "weights in a form of their makers", TRANSFORMERS_OWN),
    NOTHING,
)
Headers = dict[str, tuple[Path, str]]  # tensor name -> its file, its type as safetensors writes it


def check_config(config: PreTrainedConfig, source: str) -> None:
    """ConfigError if the values of a configuration cannot be those of a model; `source` names its file."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    for name in SIZES:
        size = getattr(text, name, None)
        unused = name == "sliding_window" and "sliding_attention" not in (kinds or ["sliding_attention"])
        if isinstance(size, int) and size < 1 and not unused:
            raise ConfigError(
                f"{source}: {name}={size}, but a model has at least one; take the model's own config.json"
            )
    _check_tokens(text, source)
    _check_ranges(text, source)
    _check_experts(text, source)
    if kinds is not None and len(kinds) != text.num_hidden_layers:
        raise ConfigError(
            f"{source}: layer_types names {len(kinds)} layers, but num_hidden_layers={text.num_hidden_layers}; "
            "change both together"
        )
    heads, groups = getattr(text, "num_attention_heads", None), getattr(text, "num_key_value_heads", None)
    if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
        raise ConfigError(f"{source}: num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    activation = getattr(text, "hidden_act", None)
    if isinstance(activation, str) and activation not in ACT2FN:
        raise ConfigError(f"{source}: hidden_act={activation!r} is no activation; {did_you_mean(activation, ACT2FN)}")
    _check_rope(getattr(text, "rope_parameters", None) or {}, source)


def _check_tokens(config: Any, source: str, size: float = math.inf) -> None:
    """ConfigError where a special token of a configuration is no token id, or the padding none of `size` embeddings."""
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        value = getattr(config, name, None)
        for token in value if isinstance(value, list) else [value]:
            if token is None or (type(token) is int and (name != "pad_token_id" or -size <= token < size)):
                continue
            raise ConfigError(f"{source}: {name}={value!r}, but it is the id of a token (vocab_size={size})")


def _check_ranges(text: PreTrainedConfig, source: str) -> None:
    for name, value in text.to_dict().items():
        if type(value) not in (int, float):
            continue
        for endings, low, high, included, says in RANGES:
            inside = low <= value <= high if included else low < value < high
            if name.endswith(endings) and not inside:
                raise ConfigError(f"{source}: {name}={value}, but it is {says}; take the model's own config.json")


def _check_experts(text: PreTrainedConfig, source: str) -> None:
    named = {name: n for name in EXPERTS if isinstance(n := getattr(text, name, None), int)}
    chosen = getattr(text, "num_experts_per_tok", None)
    for name, count in named.items():
        if count < 0 or (count and isinstance(chosen, int) and not 1 <= chosen <= count):
            raise ConfigError(
                f"{source}: {name}={count} with num_experts_per_tok={chosen}: each token goes to at least one expert "
                "and at most all; take the model's own config.json"
            )


def _check_rope(parameters: dict[str, Any], source: str) -> None:
    by_layer = [part for part in parameters.values() if isinstance(part, dict)]
    for part in by_layer or [parameters]:  # transformers 5.16 writes empty values beside those of the layers
        kind, theta = part.get("rope_type", "default"), part.get("rope_theta", 1.0)
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise ConfigError(f"{source}: rope_type={kind!r} is unknown; {did_you_mean(kind, ROPE_INIT_FUNCTIONS)}")
        if not (isinstance(theta, int | float) and 0 < theta < math.inf):
            raise ConfigError(
                f"{source}: rope_theta={theta!r}, but the base of the rotary frequencies is a number above 0; take "
                "the model's own (often 10000 or 1000000)"
            )
        for name in ("factor", "attention_factor", "partial_rotary_factor", "original_max_position_embeddings"):
            value = part.get(name)
            if type(value) in (int, float) and not 0 < value < math.inf:
                raise ConfigError(
                    f"{source}: {name}={value} of rope_parameters, but it is above 0; take the model's own"
                )
        if part.get("partial_rotary_factor", 1.0) > 1:
            raise ConfigError(f"{source}: partial_rotary_factor={part['partial_rotary_factor']}, but it is at most 1")


def check_model_for_run(
    config: PreTrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerBase, longest: int, length_keys: str
) -> list[str]:
    """Warnings about a model that is to see sequences of up to `longest` tokens; ConfigError where it cannot.

    `length_keys` names the settings that `longest` comes from.
    """
    text = config.get_text_config()
    warnings = _check_vocabulary(text.vocab_size, tokenizer)
    _check_tokens(text, f"{folder}/config.json", text.vocab_size)
    ends = _end_tokens(text, folder) or end_tokens(config, folder, tokenizer)
    outside = [token for token in ends if not 0 <= token < text.vocab_size]
    if outside:
        raise ConfigError(
            f"{folder}: the end token {outside[0]} is outside the model's vocabulary of {text.vocab_size}, so no "
            "answer would ever end; correct eos_token_id in config.json, generation_config.json and the tokenizer"
        )
    if not ends:
        warnings.append(
            f"{folder} names no end token (eos_token_id in config.json, generation_config.json or the tokenizer): "
            "every answer runs to its full length, unless a stop text ends it"
        )
    positions = getattr(text, "max_position_embeddings", None)
    if isinstance(positions, int) and longest > positions:
        limit = f"sequences may have {longest} tokens ({length_keys}), but max_position_embeddings={positions}"
        if _has_learned_positions(config, positions):
            raise ConfigError(f"{limit}, and the model has no embedding for more; lower the lengths to {positions}")
        warnings.append(f"{limit}: the model was made for no more; lower the lengths if long answers are poor")
    return warnings


def _has_learned_positions(config: PreTrainedConfig, positions: int) -> bool:
    """Whether positions are rows of a table, some families keep two more than they name."""
    if getattr(config.get_text_config(), "rope_parameters", None):
        return False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding) and m is not model.get_input_embeddings()]
    return any(0 <= table.num_embeddings - positions <= 2 for table in tables)


def _check_vocabulary(vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    vocabulary, doubts = tokenizer.get_vocab(), []
    if (file := Path(tokenizer.name_or_path) / "tokenizer.json").is_file():  # the library keeps one name of an id
        saved = json.loads(file.read_bytes())["model"].get("vocab")
        vocabulary |= saved if isinstance(saved, dict) else {}
    names = {token: name for name, token in vocabulary.items()}
    if shared := [name for name, token in vocabulary.items() if names[token] != name]:
        token = vocabulary[shared[0]]
        doubts.append(
            f"the tokenizer has several tokens with one id, such as {shared[0]!r} and {names[token]!r} with {token} "
            f"({len(shared)} in all): the model cannot tell them apart; is tokenizer.json whole?"
        )
    outside = {name: token for name, token in vocabulary.items() if token >= vocab_size}
    if not outside:
        return doubts
    name, token = max(outside.items(), key=lambda item: item[1])
    what = f"{len(outside)} tokens of the tokenizer, {name!r} ({token}) the last, have no place among the {vocab_size}"
    if outside.keys() - tokenizer.get_added_vocab().keys():
        raise ConfigError(
            f"{what} that the model has embeddings for: config.json and the tokenizer are of different models; set "
            "model.tokenizer_path to the tokenizer of this model"
        )
    return [*doubts, f"{what} that the model has embeddings for; they were added alone; a text with one is refused"]


def end_tokens(config: PreTrainedConfig, folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: those which the model's files or the tokenizer name, and the one that training
    puts there."""
    own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    return list(dict.fromkeys([*_end_tokens(config.get_text_config(), folder), *own, *end_marks(tokenizer)]))


def _end_tokens(text: PreTrainedConfig, folder: Path) -> list[int]:
    """The end tokens of config.json and generation_config.json."""
    ends: list[int] = []
    sources: list[Any] = [text]
    if (folder / "generation_config.json").is_file():
        try:
            sources.append(GenerationConfig.from_pretrained(folder, local_files_only=True))
        except Exception as error:  # the library raises whatever it meets
            raise ConfigError(f"{folder / 'generation_config.json'} cannot be used: {str(error)[:300]}") from error
        _check_tokens(sources[-1], f"{folder / 'generation_config.json'}")
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        ends += named if isinstance(named, list) else [] if named is None else [named]
    return ends


def check_readable_weights(folder: Path) -> None:
    """ConfigError where transformers finds no weights in a folder; says what it holds and what to do about it."""
    if not any((folder / name).is_file() for name in ("model.safetensors", INDEX)):
        raise ConfigError(
            f"{folder} holds no *.safetensors to read, only {listing(folder)}: {instead(folder, WITHOUT_WEIGHTS)}. Or "
            "start from random weights: +model.override_config.init_random=true"
        )


def listing(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"


def instead(folder: Path, kinds: tuple[tuple[str, str, str], ...]) -> str:
    """The first of `kinds` that is in the folder, and what to do about it."""
    for pattern, what, advice in kinds:
        if found := sorted(folder.glob(pattern)):
            return f"{what}; {advice.format(folder=folder, file=found[0].name)}"
    return "give the folder of a model"


def check_not_quantised(folder: Path) -> None:
    """ConfigError where config.json says that the weights are quantised; says how to get others."""
    if (how := quantisation(folder)) is not None:
        raise ConfigError(
            f"{folder}: its weights are quantised ({how}, says config.json), and here floating point is "
            "computed; take the model that they were made from, often named alike without the last part, or convert "
            f"them: {WRITE_PLAIN.format(folder=folder)}"
        )


def quantisation(folder: Path) -> str | None:
    """The method by which config.json says that the weights are quantised; None for plain ones."""
    try:
        values = json.loads((folder / "config.json").read_bytes())
    except (ValueError, RecursionError):  # whoever reads the configuration says what is wrong with it
        return None
    parts = [values, *values.values()] if isinstance(values, dict) else []  # of images and text: inside, too
    for part in (part for part in parts if isinstance(part, dict)):
        for settings in (part[name] for name in QUANTISED if isinstance(part.get(name), dict)):
            return str(settings.get("quant_method") or ("bitsandbytes" if "load_in_4bit" in settings else "no method"))
    return None


def check_weight_files(folder: Path, config: PreTrainedConfig) -> None:
    """CheckpointError if files lack what the index names, hold integers, or another head than the embedding's."""
    index, whole = folder / INDEX, folder / "model.safetensors"
    mapped = _read_index(index) if index.is_file() and not whole.is_file() else {}
    if gone := sorted({file for file in mapped.values() if not (folder / file).is_file()}):
        raise CheckpointError(f"{folder} has no {gone[0]}, which {INDEX} names; download the model again, whole")
    files = [whole] if whole.is_file() else {folder / file for file in mapped.values()} or folder.glob("*.safetensors")
    headers = _read_headers(sorted(files))
    lost = [name for name, file in mapped.items() if headers.get(name, (None, ""))[0] != folder / file]
    lost += [name for name in headers if mapped and name not in mapped]
    if lost:
        raise CheckpointError(
            f"{index} and the files disagree about {len(lost)} tensors, first {sorted(lost)[0]}: the index is of "
            "another model, or files were replaced; download the model again, whole"
        )
    scaled = {name.rpartition(".")[0] for name in headers if "scale" in name.rpartition(".")[2]}
    bare = sorted(n for n, (_, kind) in headers.items() if kind in FP8 and n.rpartition(".")[0] not in scaled)
    if bare:
        raise CheckpointError(
            f"{folder}: {bare[0]} is stored as {headers[bare[0]][1]} without a scale beside it, so its values are not "
            "known; download the model again, whole, or take the original"
        )
    integers = sorted(name for name, (_, kind) in headers.items() if name.endswith("weight") and kind in NOT_FLOATING)
    if integers:
        name = integers[0]
        raise CheckpointError(
            f"{folder}: {name} is stored as {headers[name][1]}, integers; trained weights are floating point. Convert "
            "the model back from its quantised form, or take the original"
        )
    if getattr(config.get_text_config(), "tie_word_embeddings", False):
        _check_tied_head(folder, headers)


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_text())
        content["metadata"]  # the library reads it too
        return {str(name): str(file) for name, file in content["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} is no index of weights ({error!r:.100}); download the model again") from error


def _read_headers(files: list[Path]) -> Headers:
    headers: Headers = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                headers |= {name: (path, file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): it was not downloaded whole, or is the pointer that git keeps in "
                "its place; download it again"
            ) from error
    return headers


def _check_tied_head(folder: Path, headers: Headers) -> None:
    """CheckpointError if the files hold a head of its own, which a model with tie_word_embeddings would not load."""
    head = next((name for name in headers if name.endswith("lm_head.weight")), None)
    embedding = next((name for name in headers if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if head is None or embedding is None:
        return
    a, b = (_read_tensor(headers[name][0], name) for name in (head, embedding))
    if a.shape != b.shape or not a.equal(b.to(a.dtype)):
        raise CheckpointError(
            f"{folder}: config.json says tie_word_embeddings=true, but {head} differs from {embedding}, and would be "
            "dropped; set model.override_config.tie_word_embeddings=false to keep it"
        )


def _read_tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def check_weights(model: nn.Module, folder: Path) -> None:
    """Refuses a model whose matrices are all zero, and warns of single ones (a value head starts at zero)."""
    matrices = {n: p for n, p in model.named_parameters() if p.dim() > 1 and not n.startswith("score.")}
    zero = [name for name, p in matrices.items() if not (p.flatten()[:4096].any() or p.any())]
    if matrices and len(zero) == len(matrices):
        raise CheckpointError(f"{folder}: every weight is zero, so nothing can be learnt; the file was never filled")
    if zero:
        logger.warning("%s: %d matrices are all zero, first %s; is the file whole?", folder, len(zero), zero[0])
