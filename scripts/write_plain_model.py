"""Write a model folder with plain weights in safetensors, from GGUF, pickled (.bin) or quantised ones.

    python scripts/write_plain_model.py FOLDER NEW_FOLDER [--gguf FILE]

`transformers` reads FOLDER, in bfloat16, and dequantises what it can: fp8, mxfp4, GGUF (pip install gguf), bitsandbytes
and compressed-tensors with their own packages. It runs no code of the folder. NEW_FOLDER gets the tokenizer too, and
appears whole or not at all. What quantising has rounded away stays lost: the original model is better.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from verl.plugin.library_versions import let_fp8_be_read
from verl.utils.errors import CheckpointError, ConfigError, VerlError


def main(argv: Sequence[str] | None = None) -> int:
    """0: written; 2: it cannot be, for the reason that the message says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the model")
    parser.add_argument("new_folder", type=Path, help="new or empty")
    parser.add_argument("--gguf", metavar="FILE", help="name of the GGUF file in FOLDER")
    options = parser.parse_args(argv)
    try:
        count = write_plain(options.folder.expanduser(), options.new_folder.expanduser().absolute(), options.gguf)
    except VerlError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.new_folder} was written: {count} parameters, bfloat16")
    return 0


def write_plain(source: Path, target: Path, gguf: str | None) -> int:
    """Write `target`; returns the number of parameters."""
    if not source.is_dir():
        raise ConfigError(f"{source} is not a folder; give the folder of a model")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is not empty; name a new folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
        whole = Path(temporary, "model")
        try:
            count = save_plain(read(source, gguf), whole)
            options = {name: value for name, value in local(gguf).items() if name != "local_files_only"}  # it is saved
            AutoTokenizer.from_pretrained(source, **options).save_pretrained(whole)
        except Exception as error:  # the library raises whatever it meets
            reason = " ".join(str(error).split())[:400]
            raise CheckpointError(
                f"transformers cannot make plain weights of {source}: {type(error).__name__}: {reason}; take the model "
                "that they were made from"
            ) from error
        os.replace(whole, target)
    return count


def local(gguf: str | None) -> dict[str, Any]:
    """What the library is asked with every file: neither the network nor code of the folder."""
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    return options if gguf is None else {**options, "gguf_file": gguf}


def read(source: Path, gguf: str | None) -> PreTrainedModel:
    """The model with floating-point weights, in memory."""
    options = local(gguf)
    if gguf is None:
        config = AutoConfig.from_pretrained(source, **options)
        if isinstance(quantised := getattr(config, "quantization_config", None), dict):
            quantised["dequantize"] = True  # read by fp8, mxfp4 and compressed-tensors, passed over by others
            check_blocks(source, quantised.get("weight_block_size"))
            let_fp8_be_read(config)
        options["config"] = config
    elif hasattr(transformers, "GgufConfig"):  # the oldest version that verl takes has none, and never keeps 4 bits
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32 if gguf else torch.bfloat16, **options)
    return model.dequantize() if getattr(model, "is_quantized", False) and hasattr(model, "hf_quantizer") else model


def check_blocks(source: Path, block: list[int] | None) -> None:
    """CheckpointError for a matrix that ends within a block: transformers spreads its scales over other weights."""
    sizes: dict[str, list[int]] = {}
    for path in source.glob("*.safetensors") if block else ():
        with safe_open(path, "pt") as file:
            sizes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    for name, scales in sizes.items():
        weight = sizes.get(name.removesuffix("_scale_inv"), [])
        if name.endswith("_scale_inv") and any(
            count > 1 and size % edge for size, count, edge in zip(weight[-2:], scales[-2:], block or (), strict=True)
        ):
            raise CheckpointError(f"{name} is for {weight} weights, which are not whole blocks of {block}")


def save_plain(model: PreTrainedModel, target: Path) -> int:
    """Save the weights through a model of the same shape that was never quantised, else they are written quantised."""
    values = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    with torch.device("meta"):
        plain = type(model)(type(model.config).from_dict(values))
    plain.load_state_dict(model.to(torch.bfloat16).state_dict(), assign=True)
    plain.generation_config = model.generation_config
    plain.save_pretrained(target)
    return sum(parameter.numel() for parameter in plain.parameters())


if __name__ == "__main__":
    sys.exit(main())
