"""Write a model with random weights: the configuration of a model folder with some values changed, and its tokenizer.

    python scripts/init_random_model.py --hf_model_path DIR --new_config_path small.json --output_path small

small.json holds the values that change, for instance {"num_hidden_layers": 2, "hidden_size": 64}. No weights are read.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from verl.config import HFModelConfig
from verl.models.load import load_tokenizer, model_folder, read_config
from verl.utils.errors import ConfigError, DataError, VerlError
from verl.utils.suggest import did_you_mean

DESCRIPTIVE = ("architectures", "model_type", "transformers_version")  # of a whole config.json
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """0: written; 2: a mistake the message explains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf_model_path", required=True, help="folder with config.json and the tokenizer")
    parser.add_argument("--new_config_path", type=Path, help="JSON file with the values that change")
    parser.add_argument("--output_path", type=Path, required=True, help="a folder that is new or empty")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        changes = read_changes(options.new_config_path) if options.new_config_path else {}
        count = write_model(options.hf_model_path, changes, options.output_path, DTYPES[options.dtype], options.seed)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.output_path}: {count} parameters at random, {options.dtype}")
    return 0


def read_changes(path: Path) -> dict[str, Any]:
    """The values of a JSON file; DataError where it holds no object."""
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"--new_config_path={path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"--new_config_path={path} must hold an object {{...}}, but it holds {str(values)[:80]}")
    return values


def write_model(source: str, changes: dict[str, Any], target: Path, dtype: torch.dtype, seed: int) -> int:
    """Write model and tokenizer to `target`; returns the number of parameters."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--output_path={target} is not empty; name a new folder")
    config = read_config(model_folder(source))
    kind = changes.get("model_type", config.model_type)
    if kind != config.model_type:
        raise ConfigError(
            f"model_type is {kind!r} in the file and {config.model_type!r} in {source}; name such a model"
        )
    known = config.to_dict()
    for name in changes.keys() - known.keys() - set(DESCRIPTIVE):
        raise ConfigError(f"--new_config_path: {config.model_type} has no {name!r}; {did_you_mean(name, known)}")
    wanted = known | {name: value for name, value in changes.items() if name not in DESCRIPTIVE}
    if "num_hidden_layers" in changes and "layer_types" not in changes and wanted.get("layer_types"):
        kinds = wanted["layer_types"]  # one for each layer: the pattern goes on
        wanted["layer_types"] = [kinds[i % len(kinds)] for i in range(changes["num_hidden_layers"])]
    try:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(type(config).from_dict(wanted), dtype=dtype)
    except Exception as error:  # the library checks values in its own ways
        raise ConfigError(f"no model can be made of these values: {str(error)[:300]}") from error
    load_tokenizer(HFModelConfig(path=source)).save_pretrained(target)
    model.save_pretrained(target)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    sys.exit(main())
