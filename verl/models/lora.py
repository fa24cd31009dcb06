"""LoRA: trains low-rank updates of frozen linear layers, and the head of a critic; all else is frozen.

A layer computes W x + s B A x with A (r, in), B (out, r) and s = lora_alpha / r. peft puts the layers into the model,
which keeps its class: code that reads a model's parts works as before. Outside of training a model with adapters has
the weights W + s B A (`merge_adapters`).
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from verl.config import HFModelConfig
from verl.plugin.platform.cpu import PlatformCPU
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import expand_home
from verl.utils.suggest import did_you_mean

if TYPE_CHECKING:
    import peft

ADAPTER_NAME = "default"  # peft stores the adapters of a layer by name; there is one
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
VALUE_HEAD = "score"
# Settings of peft that a merge of W + s B A does not cover, with the value that turns them off.
UNSUPPORTED_SETTINGS = {
    "use_dora": False, "lora_bias": False, "bias": "none", "fan_in_fan_out": False, "target_parameters": None,
    "trainable_token_indices": None, "layer_replication": None,
}  # fmt: skip


NAMES_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj")  # also of dense MLPs and of shared experts


def wants_lora(settings: HFModelConfig) -> bool:
    """Whether `model.*` asks for adapters."""
    return settings.lora_rank > 0 or settings.lora_adapter_path is not None


def largest_rank(settings: HFModelConfig) -> int:
    """The largest rank of the adapters that `model.*` asks for."""
    if settings.lora_adapter_path is None:
        return settings.lora_rank
    folder = expand_home(settings.lora_adapter_path, "model.lora_adapter_path")
    config = _lora_config_of_folder(folder, settings.lora_rank)
    return max(config.r, *(config.rank_pattern or {}).values())


def add_adapters(model: nn.Module, settings: HFModelConfig, seed: int, structure_only: bool = False) -> None:
    """Put adapters into `model`, freeze all but a value head: new ones from `seed` (B is 0), or lora_adapter_path's.

    Adapters are float32 or wider. With `structure_only` they are on the meta device, without values.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"model.lora_rank needs peft ({error}); pip install -e '.[lora]'") from error
    path = settings.lora_adapter_path
    folder = None if path is None else expand_home(path, "model.lora_adapter_path")
    _check_module_names(model, settings)
    config = _new_lora_config(model, settings) if folder is None else _lora_config_of_folder(folder, settings.lora_rank)
    _check_adapter_memory(model, config)
    wide_dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        listed = [] if isinstance(config.target_modules, str) else config.target_modules or ()
        paths = [name for name in listed if "." in name and name.rpartition(".")[2] in NAMES_OF_EXPERTS]
        try:
            with _untranslated_names(model) if paths and _has_joined_experts(model) else contextlib.nullcontext():
                peft.inject_adapter_in_model(config, model, ADAPTER_NAME, low_cpu_mem_usage=structure_only)
        except ValueError as error:
            raise ConfigError(f"no LoRA with model.target_modules={settings.target_modules!r}: {error}") from error
    _check_adapted_layers(model)
    head = getattr(model, VALUE_HEAD, None)
    if isinstance(head, nn.Linear):
        head.requires_grad_(True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(wide_dtype)
    if folder is not None and not structure_only:
        _load_adapters(model, folder)


def _new_lora_config(model: nn.Module, settings: HFModelConfig) -> "peft.LoraConfig":
    import peft

    exclude = settings.exclude_modules
    if hasattr(model, VALUE_HEAD):  # trained without an adapter
        exclude = f"({exclude})|{VALUE_HEAD}" if isinstance(exclude, str) else [*(exclude or ()), VALUE_HEAD]
    target = settings.target_modules
    if target == "all-linear":
        target = _all_linear(model)
    return peft.LoraConfig(
        task_type=_task_type(model),
        base_model_name_or_path=settings.path,
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=target,
        exclude_modules=exclude,
    )


def _task_type(model: nn.Module) -> str:
    """The model's task in peft's words."""
    if not hasattr(model, VALUE_HEAD):
        return "CAUSAL_LM"
    return "SEQ_CLS" if type(model).__name__.endswith("ForSequenceClassification") else "TOKEN_CLS"


def _check_adapter_memory(model: nn.Module, config: "peft.LoraConfig") -> None:
    """ConfigError if the adapters alone would not fit into the memory of this machine, where they are made."""
    target = config.target_modules or ()
    sizes = [
        m.in_features + m.out_features
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear)
        and (
            re.fullmatch(target, name)
            if isinstance(target, str)
            else f".{name}".endswith(tuple(f".{t}" for t in target))
        )
    ]
    needed, (available, _) = 4 * config.r * sum(sizes), PlatformCPU().memory_info()
    if needed > available > 0:
        raise ConfigError(
            f"model.lora_rank={config.r} makes adapters of {needed / 2**30:.0f} GiB in float32, and this machine has "
            f"{available / 2**30:.0f} GiB free; at most {available // (4 * sum(sizes))} would fit, 8 to 256 are usual"
        )


def _all_linear(model: nn.Module) -> list[str]:
    """Names of all linear layers below the head; whole paths for those whose last part also names joined experts."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = [name for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    shared = NAMES_OF_EXPERTS if _has_joined_experts(model) else ()
    names = {name if name.rpartition(".")[2] in shared else name.rpartition(".")[2] for name in linear}
    return sorted(names - {VALUE_HEAD})


def _has_joined_experts(model: nn.Module) -> bool:
    """Whether the experts of a layer are stored in one tensor, which gets no adapters."""
    return any(".experts." in name and parameter.dim() == 3 for name, parameter in model.named_parameters())


@contextlib.contextmanager
def _untranslated_names(model: Any) -> Iterator[None]:
    """Inside the block peft takes `gate_proj` and its like for layers of that name, not for joined experts.

    It translates these names, which are those of experts in files of transformers 4, in every model with a family.
    """
    config = model.config
    model.config = config.to_dict()
    try:
        yield
    finally:
        model.config = config


def _lora_config_of_folder(folder: Path, lora_rank: int) -> "peft.LoraConfig":
    """The settings in a folder of adapters, whose rank is `lora_rank` (0: any); alpha and layers are the folder's.

    Dropout is off: an update needs the log-probs of the sampling policy.
    """
    import peft

    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"model.lora_adapter_path={folder} has no {' and no '.join(missing)}; give a PEFT folder")
    config = peft.PeftConfig.from_pretrained(str(folder))
    if layers := _linear_layers_of(getattr(config, "target_parameters", None) or ()):
        config.target_modules, config.target_parameters = {*(config.target_modules or ()), *layers}, None
    unsupported = {"peft_type": config.peft_type} if config.peft_type != peft.PeftType.LORA else {}
    unsupported |= {
        n: getattr(config, n)
        for n, plain in UNSUPPORTED_SETTINGS.items()
        if getattr(config, n, plain) not in (plain, [], {})
    }
    if set(getattr(config, "modules_to_save", None) or ()) - {VALUE_HEAD}:
        unsupported["modules_to_save"] = config.modules_to_save
    if unsupported:
        what = ", ".join(f"{name}={value}" for name, value in unsupported.items())
        raise ConfigError(f"model.lora_adapter_path={folder} has {what}; only plain LoRA of linear layers is trained")
    if lora_rank not in (0, config.r):
        raise ConfigError(
            f"model.lora_rank={lora_rank}, but the adapters in {folder} have rank {config.r}; leave lora_rank "
            f"out or set it to {config.r}"
        )
    config.modules_to_save, config.lora_dropout, config.inference_mode = None, 0.0, False
    return config


def _linear_layers_of(parameters: Iterable[str]) -> list[str]:
    """The linear layers whose weights `write_adapter_config` named; none if there is another parameter."""
    names = list(parameters)
    is_ours = all(re.fullmatch(rf"(.+\.)?({'|'.join(NAMES_OF_EXPERTS)})\.weight", name) for name in names)
    return [name.removesuffix(".weight") for name in names] if is_ours else []


def _check_adapted_layers(model: nn.Module) -> None:
    """ConfigError unless all adapters are on linear layers below the head, where the merge is W + s B A."""
    refused = [name for name, m in model.named_modules() if is_adapted(m) and type(m.base_layer) is not nn.Linear]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    refused += [name for name, m in model.named_modules() if m is head and is_adapted(m)]
    if refused:
        raise ConfigError(
            f"model.target_modules asks for adapters of {', '.join(refused[:3])}; only linear layers below the head "
            f"can have them: name it in model.exclude_modules"
        )


def _check_module_names(model: nn.Module, settings: HFModelConfig) -> None:
    """ConfigError if a listed name matches no module; peft accepts one match per list, and none for exclusions."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    modules = [name for name, _ in model.named_modules()]
    for key, what, paths in (("target_modules", "module", modules), ("exclude_modules", "linear layer", linear)):
        setting = settings[key]
        for wanted in setting if isinstance(setting, list) else ():
            if not any(f".{path}".endswith(f".{wanted}") for path in paths):
                known = {path.rpartition(".")[2] for path in linear}
                raise ConfigError(f"model.{key} names {wanted!r}, which is no {what}; {did_you_mean(wanted, known)}")
        if isinstance(setting, str):
            try:
                pattern = re.compile(setting)
            except re.error as error:
                raise ConfigError(f"model.{key}={setting!r} is no regular expression: {error}") from error
            if key == "exclude_modules" and not any(pattern.fullmatch(path) for path in linear):
                raise ConfigError(
                    f"model.{key}={setting!r} matches the whole path of no linear layer, as {linear[0]!r} is one; "
                    f"list names, or write '.*{setting}'"
                )


def _load_adapters(model: nn.Module, folder: Path) -> None:
    saved = load_file(folder / ADAPTER_WEIGHTS)
    trained = {adapter_key(name): p for name, p in model.named_parameters() if p.requires_grad}
    wrong = [f"{name} is not in the model" for name in sorted(saved.keys() - trained.keys())]
    for name, parameter in trained.items():
        if name not in saved:
            wrong += [] if f".{VALUE_HEAD}." in name else [f"{name} is missing"]
        elif saved[name].shape != parameter.shape:
            wrong.append(f"{name} is {tuple(saved[name].shape)}, not {tuple(parameter.shape)}")
    if wrong:
        raise CheckpointError(
            f"{folder / ADAPTER_WEIGHTS} does not fit the model, {len(wrong)} tensors differ: {'; '.join(wrong[:3])}; "
            "use the adapters of this model"
        )
    for name, value in saved.items():
        trained[name].data.copy_(value)


def check_adapter_scale(model: Any, folder: Path) -> None:
    """CheckpointError if the adapters in `folder` were trained with another s, which would change the model."""
    if has_adapters(model) and (folder / ADAPTER_CONFIG).is_file():
        saved = json.loads((folder / ADAPTER_CONFIG).read_text())["lora_alpha"]
        current = model.peft_config[ADAPTER_NAME].lora_alpha
        if saved != current:
            raise CheckpointError(f"{folder} was trained with model.lora_alpha={saved}, now {current}; set it back")


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a layer with an adapter."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def has_adapters(model: nn.Module) -> bool:
    return any(is_adapted(module) for module in model.modules())


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside the block `model` computes the same as before it had adapters, bit for bit."""
    layers: list[Any] = [module for module in model.modules() if is_adapted(module)]
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters(False)` would also freeze them; the optimiser would lose them
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# --- names and values outside of training ---------------------------------------------------------------------------


def base_name(name: str) -> str | None:
    """The name of a parameter in the model without adapters; None for those of an adapter."""
    return None if ".lora_" in name else name.replace(".base_layer.", ".")


def adapter_key(name: str) -> str:
    """The name of a trained parameter in a folder of adapters."""
    return f"base_model.model.{name.replace(f'.{ADAPTER_NAME}.weight', '.weight')}"


def adapter_scales(model: nn.Module) -> dict[str, float]:
    """s of every layer with an adapter."""
    return {name: layer.scaling[ADAPTER_NAME] for name, layer in model.named_modules() if is_adapted(layer)}


def merge_adapters(tensors: Iterable[tuple[str, Tensor]], scales: dict[str, float]) -> Iterator[tuple[str, Tensor]]:
    """(name in the base model, W + s B A) of (name, whole tensor) in the model's order; the order stays."""
    pending: dict[str, Tensor] = {}  # of one layer: weight, bias, A
    for name, tensor in tensors:
        layer, _, part = name.partition(".lora_")
        if part.startswith("B."):
            weight, *biases = (pending.pop(n) for n in ("weight", "bias") if n in pending)
            yield f"{layer}.weight", merge_weight(weight, pending.pop("A"), tensor, scales[layer])
            yield from ((f"{layer}.bias", bias) for bias in biases)
        elif part:
            pending["A"] = tensor
        elif ".base_layer." in name:
            pending[name.rpartition(".")[2]] = tensor
        else:
            yield name, tensor


def split_adapters(tensors: Iterable[tuple[str, Tensor]], scales: dict[str, float]) -> Iterator[tuple[str, Tensor]]:
    """(name in the base model or in a folder of adapters, tensor) of (name, whole tensor); B is multiplied by s."""
    for name, tensor in tensors:
        layer, _, part = name.partition(".lora_")
        if part:
            yield adapter_key(name), tensor.detach() * scales[layer] if part.startswith("B.") else tensor
        else:
            yield name.replace(".base_layer.", "."), tensor


@torch.no_grad()
def merge_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """W + s B A, rounded once to the type of W."""
    wide_dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.addmm(weight.to(wide_dtype), b.to(wide_dtype), a.to(wide_dtype), alpha=scale).to(weight.dtype)


def merged_weight(layer: Any) -> Tensor:
    """The merged weight of a layer with an adapter."""
    return merge_weight(
        layer.base_layer.weight,
        layer.lora_A[ADAPTER_NAME].weight,
        layer.lora_B[ADAPTER_NAME].weight,
        layer.scaling[ADAPTER_NAME],
    )


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write adapter_config.json, as peft reads it."""
    config = copy.copy(model.peft_config[ADAPTER_NAME])
    config.inference_mode = True
    config.modules_to_save = [VALUE_HEAD] if hasattr(model, VALUE_HEAD) else None
    if _has_joined_experts(model):  # as modules, peft would take these names for those of experts
        adapted = [name for name, module in model.named_modules() if is_adapted(module)]
        experts_names = [name for name in adapted if name.rpartition(".")[2] in NAMES_OF_EXPERTS]
        config.target_modules = {n.rpartition(".")[2] for n in adapted if n not in experts_names}
        config.target_parameters = [f"{name}.weight" for name in experts_names] or None
    config.save_pretrained(str(folder))
