"""A model as a Hugging Face folder that other programs load, proved equal to what is in memory before it counts."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from verl.config import HFModelConfig
from verl.models.load import load_tokenizer, no_progress_bars
from verl.utils.errors import CheckpointError

SMALL = 50_000_000  # parameters up to which the logits of the reloaded model are compared too
MAX_SHARD_SIZE = "5GB"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
PROBE_TOKENS = 16


def export_config_and_tokenizer(model: PreTrainedModel, settings: HFModelConfig, folder: Path) -> None:
    """config.json, generation_config.json, and the tokenizer where the model's folder has one."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    source = Path(settings.tokenizer_path or settings.path or "").expanduser()
    if any((source / name).is_file() for name in TOKENIZER_FILES):
        load_tokenizer(settings).save_pretrained(folder)


@no_progress_bars()
def export_model(
    model: PreTrainedModel, weights: dict[str, Tensor], folder: Path, verify: str = "auto"
) -> dict[str, str]:
    """Writes `weights` (name -> tensor, tied ones once) as safetensors shards and returns sha256 by tensor name.

    Every tensor is read back and compared by digest. With `verify` "logits", or "auto" and a small model, the folder is
    also loaded as a user would and its logits compared with the model's. A difference is a CheckpointError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    model.save_pretrained(folder, state_dict=dict(state), max_shard_size=MAX_SHARD_SIZE)
    _state_dtype(folder, next(iter(state.values())).dtype)
    digests = _compare_files(state, folder)
    if digests.keys() != state.keys():  # the library renamed or split tensors on disk: load them to compare
        _compare_reloaded(model, state, folder)
    if verify == "logits" or (verify == "auto" and sum(t.numel() for t in state.values()) <= SMALL):
        _compare_logits(model, folder)
    return digests


def tensor_digest(tensor: Tensor) -> str:
    """sha256 over type, shape and bytes."""
    header = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(header + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _state_dtype(folder: Path, dtype: torch.dtype) -> None:
    """config.json names the type of the weights on disk, not the one the model computes in."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _compare_files(state: dict[str, Tensor], folder: Path) -> dict[str, str]:
    """Digests by name of the tensors on disk; those that are in memory under the same name must be equal."""
    digests: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                digests[name] = tensor_digest(file.get_tensor(name))
    different = [name for name in digests if name in state and digests[name] != tensor_digest(state[name])]
    if different:
        raise CheckpointError(
            f"{folder} was written, but {len(different)} tensors read back differently, first {different[0]}; the disk "
            "or the file system is at fault: save somewhere else"
        )
    return digests


@torch.no_grad()
def _compare_reloaded(model: PreTrainedModel, state: dict[str, Tensor], folder: Path) -> None:
    dtype = next(iter(state.values())).dtype
    reloaded = type(model).from_pretrained(folder, dtype=dtype, local_files_only=True)
    found = dict(reloaded.named_parameters())
    different = [name for name in state if name not in found or not torch.equal(found[name].cpu(), state[name])]
    if different:
        raise CheckpointError(
            f"{folder} loads, but {len(different)} of {len(state)} tensors are not those in memory, first "
            f"{different[0]}"
        )


@torch.no_grad()
def _compare_logits(model: PreTrainedModel, folder: Path) -> None:
    reloaded = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True).to(model.device).eval()
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(PROBE_TOKENS, device=model.device)[None] * 7919 % vocabulary
    was_training = model.training
    model.eval()
    ours, theirs = (m(input_ids=tokens, use_cache=False).logits.double() for m in (model, reloaded))
    model.train(was_training)
    tolerance = 16 * PROBE_TOKENS * torch.finfo(model.dtype).eps * float(ours.abs().max())
    difference = float((ours - theirs).abs().max())
    if not difference <= tolerance:
        raise CheckpointError(
            f"{folder} loads, but its logits differ from the model's by up to {difference:.3g} (allowed "
            f"{tolerance:.3g}); do not use this folder"
        )
