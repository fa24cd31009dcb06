"""Exports a model as a Hugging Face folder, and verifies the folder against the model in memory.

The folder is written tensor by tensor, or layer by layer where the family's format joins tensors of a layer. A rank has
at most one layer in memory, and one rank writes each file.
"""

import copy
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from verl.config import HFModelConfig
from verl.data.chat import end_marks
from verl.models.load import load_tokenizer, no_progress_bars
from verl.models.model_place import find_folder
from verl.models.tensor_file import TensorFile, digests_in, size_bytes, tensor_digest
from verl.utils.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

MAX_PARAMETERS_FOR_LOGIT_CHECK = 50_000_000  # parameters up to which the logits of the reloaded model are compared too
MAX_FILE_BYTES = 5_000_000_000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
NUM_FIXED_TOKENS = 16
GENERATION_MODES = ("do_sample", "num_beams", "return_dict_in_generate", "use_cache")  # what other values depend on
INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"(.*?\.\d+)\.")

NamedTensors = Iterable[tuple[str, Tensor]]  # (name in the model, whole tensor); tied ones once
TensorsByName = dict[str, Tensor]  # by names on disk


def model_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The model's `transformers` class, also after FSDP has replaced the class."""
    kinds = type(model).__mro__
    return next(k for k in kinds if issubclass(k, PreTrainedModel) and not issubclass(k, FSDPModule))


def export_config_and_tokenizer(model: PreTrainedModel, settings: HFModelConfig, folder: Path) -> None:
    """config.json, generation_config.json, and the tokenizer with its template if the model's folder has one."""
    folder.mkdir(parents=True, exist_ok=True)
    source = find_folder(settings.tokenizer_path or settings.path or "", "path") or Path()
    has_tokenizer = any((source / name).is_file() for name in TOKENIZER_FILES)
    tokenizer = load_tokenizer(settings) if has_tokenizer else None
    config = copy.deepcopy(model.config)
    config.architectures = [model_class(model).__name__]
    _save(config, folder, f"config.json of {settings.path}")
    if (generation := generation_config_to_save(model, tokenizer)) is not None:
        _save(generation, folder, f"generation_config.json of {settings.path}")
    if tokenizer is not None:
        _save(tokenizer, folder, f"the tokenizer of {source}")


def generation_config_to_save(model: PreTrainedModel, tokenizer: Any) -> GenerationConfig | None:
    """The model's generation config as it is saved, None for a model that generates nothing."""
    if not model.can_generate() or model.generation_config is None:
        return None
    values = fitting_generation_values(model.generation_config.to_diff_dict())
    return GenerationConfig(**with_end_marks(values, tokenizer))


def with_end_marks(values: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """`values` of a generation config whose eos_token_id has what training puts behind an answer: a program that does
    not know it never stops."""
    named = values.get("eos_token_id")
    before = named if isinstance(named, list) else [] if named is None else [named]
    new = [token for token in end_marks(tokenizer) if token not in before]
    return {**values, "eos_token_id": [*before, *new]} if new else values


def fitting_generation_values(values: dict[str, Any]) -> dict[str, Any]:
    """`values` of a generation config without those that `transformers` refuses; a warning names what is left out.

    Many published models have such values, a temperature without do_sample above all.
    """
    if _fits(values):
        return values
    fitting: dict[str, Any] = {}
    for name in sorted(values, key=lambda name: (name not in GENERATION_MODES, name)):
        if _fits({**fitting, name: values[name]}):
            fitting[name] = values[name]
    logger.warning(
        "the saved generation_config.json leaves out %s, which transformers refuses beside the other values; to keep "
        'them, correct the model\'s own file (often "do_sample": true is missing)',
        ", ".join(f"{name}={value!r}" for name, value in values.items() if name not in fitting),
    )
    return fitting


def _fits(values: dict[str, Any]) -> bool:
    nested = {name: value for name, value in values.items() if isinstance(value, dict)}
    try:
        config = GenerationConfig(**nested)  # given all at once, it would warn of what is looked for here
        vars(config).update({name: value for name, value in values.items() if name not in nested})
        config.validate(strict=True)
    except (ValueError, TypeError, AttributeError):  # values of another type fail in comparisons
        return False
    return True


def _save(part: Any, folder: Path, what: str) -> None:
    try:
        part.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the library's classes check in their own ways
        raise ConfigError(
            f"{what} cannot be saved ({type(error).__name__}: {' '.join(str(error).split())[:300]}), so the trained "
            "model could not be either; correct the file in the model's folder"
        ) from error


@dataclass
class PlannedFile:
    """One file of the folder: its layers, and meta tensors of its content."""

    layers: list[tuple[str, ...]] = field(default_factory=list)  # names in the model
    tensors: TensorsByName = field(default_factory=dict)
    name: str = ""


@dataclass
class ExportDigests:
    """sha256 of what one rank wrote: by file, and by tensor in the model if the reloaded model is to be compared."""

    files: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportPlan:
    """Which layer goes to which file, and which rank writes it. The same on every rank."""

    model: PreTrainedModel
    files: list[PlannedFile]
    rank: int
    size: int

    def writes(self, file: PlannedFile) -> bool:
        """Whether this rank writes `file`."""
        return self.files.index(file) % self.size == self.rank

    def own_layers(self, weights: NamedTensors) -> Iterator[tuple[PlannedFile, dict[str, Tensor]]]:
        """The complete layers of this rank's files, one at a time. A collective: it reads all of `weights`."""
        location = {name: (file, layer) for file in self.files for layer in file.layers for name in layer}
        own_files = {id(file) for file in self.files if self.writes(file)}
        pending: dict[str, Tensor] = {}
        for name, tensor in weights:
            assert name in location, f"{name} was not in the plan of the export"
            file, layer = location[name]
            if id(file) not in own_files:
                continue
            pending[name] = tensor
            del tensor
            if all(n in pending for n in layer):
                yield file, {n: pending.pop(n) for n in layer}
        assert not pending, f"the export lacks parts of the layer of {next(iter(pending))}"

    def wants_reload(self, verify: str) -> bool:
        """Whether `verify` asks to load the folder as a user would: "logits", or "auto" and a small model."""
        elements = sum(t.numel() for file in self.files for t in file.tensors.values())
        return verify == "logits" or (verify == "auto" and elements <= MAX_PARAMETERS_FOR_LOGIT_CHECK)


def plan_export(model: PreTrainedModel, shapes: Mapping[str, Tensor], rank: int = 0, size: int = 1) -> ExportPlan:
    """Files of at most `MAX_FILE_BYTES`, and at least one per rank if there are enough layers."""
    meta = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in shapes.items()}
    limit = min(MAX_FILE_BYTES, -(-size_bytes(meta.values()) // size))
    files = [PlannedFile()]
    for names in _units_to_write(model, meta):
        tensors = to_hub_format(model, {name: meta[name] for name in names})
        file_bytes = size_bytes(files[-1].tensors.values())
        if file_bytes and file_bytes + size_bytes(tensors.values()) > limit:
            files.append(PlannedFile())
        files[-1].layers.append(names)
        files[-1].tensors.update(tensors)
    for number, file in enumerate(files, 1):
        file.name = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
    return ExportPlan(model, files, rank, size)


def _units_to_write(model: PreTrainedModel, meta: TensorsByName) -> list[tuple[str, ...]]:
    """Units written at once, in the order in which they are complete: single tensors, layers with joined tensors."""
    units: list[tuple[str, ...]] = []
    for layer in _names_by_layer(meta):
        joined_tensors = to_hub_format(model, {name: meta[name] for name in layer})
        single_tensors: TensorsByName = {}
        for name in layer:
            single_tensors.update(to_hub_format(model, {name: meta[name]}))
        same = {n: t.shape for n, t in single_tensors.items()} == {n: t.shape for n, t in joined_tensors.items()}
        units.extend([(name,) for name in layer] if same else [layer])
    location = {name: number for number, name in enumerate(meta)}
    return sorted(units, key=lambda names: max(location[name] for name in names))


def _names_by_layer(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Names grouped by layer, those outside of layers alone; ordered by when a layer is complete."""
    groups: dict[str, list[str]] = {}
    for name in names:
        match = _LAYER.match(name)
        key = match.group(1) if match else name
        groups[key] = [*groups.pop(key, []), name]
    return [tuple(group) for group in groups.values()]


def to_hub_format(model: PreTrainedModel, tensors: dict[str, Tensor]) -> TensorsByName:
    """Tensors with the names and shapes of the family's folders."""
    model._weight_conversions = None  # only rank 0 read a folder and has the conversions of that folder
    return dict(revert_weight_conversion(model, tensors))


def write_layers(
    plan: ExportPlan, layers: Iterable[tuple[PlannedFile, dict[str, Tensor]]], folder: Path, hash_tensors: bool = False
) -> ExportDigests:
    """Write this rank's files and read them back; rank 0 also writes the index and the dtype of config.json.

    With `hash_tensors` the result also has the tensors' digests, for `reload_export`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = ExportDigests()
    for _, group in groupby(layers, key=lambda item: id(item[0])):
        _write_file(plan, group, folder, written, hash_tensors)
    assert len(written.files) == sum(map(plan.writes, plan.files)), "an export file was left unfinished"
    if plan.rank == 0:
        _write_index_and_dtype(plan, folder)
    return written


def _write_file(
    plan: ExportPlan,
    layers: Iterator[tuple[PlannedFile, dict[str, Tensor]]],
    folder: Path,
    written: ExportDigests,
    hash_tensors: bool,
) -> None:
    """Write the file of `layers`, read it back, and add its digests to `written`."""
    planned, layer = next(layers)
    digests: dict[str, str] = {}
    with TensorFile(folder / planned.name, planned.tensors) as file:
        while layer is not None:
            if hash_tensors:
                written.tensors.update({name: tensor_digest(tensor) for name, tensor in layer.items()})
            on_disk = to_hub_format(plan.model, layer)
            for name in list(on_disk):
                tensor = on_disk.pop(name).cpu()
                file.add(name, tensor)
                digests[name] = tensor_digest(tensor)
            layer.clear()
            _, layer = next(layers, (None, None))
    written.files[planned.name] = file.digest
    _check_digests(folder / planned.name, digests)


def _write_index_and_dtype(plan: ExportPlan, folder: Path) -> None:
    tensors = {name: tensor for file in plan.files for name, tensor in file.tensors.items()}
    _write_dtype(folder, next(iter(tensors.values())).dtype)
    if len(plan.files) > 1:
        index = {
            "metadata": {"total_size": size_bytes(tensors.values())},
            "weight_map": {name: file.name for file in plan.files for name in file.tensors},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_dtype(folder: Path, dtype: torch.dtype) -> None:
    """config.json names the type of the weights on disk, not the one the model computes in."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _check_digests(path: Path, digests: dict[str, str]) -> None:
    """CheckpointError unless the tensors of a file have the sha256 by name of `digests`."""
    on_disk = digests_in(path)
    different = sorted(name for name in on_disk.keys() | digests.keys() if on_disk.get(name) != digests.get(name))
    if different:
        raise CheckpointError(
            f"{path} was written, but {len(different)} tensors read back differently, first {different[0]}; the disk "
            "or the file system is at fault: save somewhere else"
        )


@no_progress_bars()
def reload_export(plan: ExportPlan, digests: Mapping[str, str], folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The folder loaded as a user would; CheckpointError unless its tensors have the sha256 of `digests`."""
    reloaded = model_class(plan.model).from_pretrained(folder, dtype=dtype, local_files_only=True)
    tensors = {**dict(reloaded.named_parameters()), **dict(reloaded.named_buffers())}
    different = [name for name in digests if name not in tensors or tensor_digest(tensors[name]) != digests[name]]
    if different:
        raise CheckpointError(
            f"{folder} loads, but {len(different)} tensors are not those in memory, first {different[0]}"
        )
    return reloaded


@torch.no_grad()
def compare_logits(reloaded: PreTrainedModel, logits: Tensor, folder: Path) -> None:
    """CheckpointError unless `reloaded`, cast and moved like `logits`, computes them within rounding."""
    for parameter in reloaded.parameters():
        parameter.data = parameter.data.to(logits.dtype)
    reloaded_logits = fixed_token_logits(reloaded.to(logits.device).eval())
    eps = max(torch.finfo(logits.dtype).eps, torch.finfo(torch.float32).eps)  # the library's norms round to float32
    tolerance = 16 * NUM_FIXED_TOKENS * eps * float(logits.abs().max())
    difference = float((logits.double() - reloaded_logits.double()).abs().max())
    if not difference <= tolerance:
        raise CheckpointError(
            f"{folder} loads, but its logits differ from the model's by up to {difference:.3g} (allowed "
            f"{tolerance:.3g}); do not use this folder"
        )


@torch.no_grad()
def fixed_token_logits(model: PreTrainedModel) -> Tensor:
    """(1, NUM_FIXED_TOKENS, V) of a few fixed tokens. A collective if the model is sharded."""
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(NUM_FIXED_TOKENS, device=model.device)[None] * 7919 % vocabulary
    was_training = model.training
    model.eval()
    logits = model(input_ids=tokens, use_cache=False).logits
    model.train(was_training)
    return logits
