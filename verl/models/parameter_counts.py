"""Numbers of parameters, without loading weights: from the headers of safetensors, or from a config.json alone."""

import json
import math
import struct
from pathlib import Path
from typing import NamedTuple

from verl.config import HFModelConfig
from verl.models.model_place import existing_folder

_LARGEST_HEADER_BYTES = 100_000_000  # of a safetensors file
_EXPERTS = ".experts."  # in the names of parameters that expert parallelism distributes


class ParameterCounts(NamedTuple):
    """Parameters of a model: all, those in experts, and those that are trained."""

    all: int
    experts: int = 0
    trained: int = 0


def stored_parameters(folder: Path) -> ParameterCounts:
    """Parameters in the safetensors files of a folder, read from their headers; 0 where that cannot be read."""
    sizes: dict[str, int] = {}
    try:
        for file in folder.glob("*.safetensors"):
            with open(file, "rb") as stream:
                (size,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(size, _LARGEST_HEADER_BYTES)))
            sizes.update((name, math.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return ParameterCounts(0)
    return _counts(sizes, sum(sizes.values()))


def model_parameters(model: HFModelConfig) -> ParameterCounts:
    """Parameters of the model of `model.path`: of its files where it is trained as a whole and has files, else of the
    modules that its config.json and the adapters of `model.*` describe, which loads torch but no weights.

    ConfigError where no folder is there, or its configuration cannot be used.
    """
    has_adapters = bool(model.lora_rank or model.lora_adapter_path)
    folder = existing_folder(model.path, "path")
    if not has_adapters and (stored := stored_parameters(folder)).all:
        return stored
    from verl.models.load import build_config, load_causal_lm
    from verl.models.lora import add_adapters

    module = load_causal_lm(folder, config=build_config(model)[0], structure_only=True)
    if has_adapters:
        add_adapters(module, model, seed=0, structure_only=True)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    return _counts({name: p.numel() for name, p in module.named_parameters()}, trained)


def _counts(sizes: dict[str, int], trained: int) -> ParameterCounts:
    experts = sum(size for name, size in sizes.items() if _EXPERTS in name)
    return ParameterCounts(sum(sizes.values()), experts, trained)
