"""An engine's checkpoint: safetensors and JSON, a digest of every file, nothing pickled.

    <folder>/model.safetensors       trained parameters (tied ones once) and persistent buffers
    <folder>/optimizer.safetensors   "<parameter>|<state>" per tensor; steps included
    <folder>/extra.json              schedule, counters, random number generators (Python, NumPy)
    <folder>/extra.safetensors       torch generators
    <folder>/huggingface/            config and tokenizer; with hf_model the weights too
    <folder>/manifest.json           contents, and sha256 of every file; written last

Whoever saves several roles at once makes the folder atomic (`verl.utils.paths.atomic_directory`).
"""

import hashlib
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from verl.models.export import export_config_and_tokenizer, export_model
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import atomic_write_text

if TYPE_CHECKING:
    from verl.workers.engine.torch_engine import TorchEngine

CONTENTS = ("model", "optimizer", "extra", "hf_model")
MANIFEST = "manifest.json"
FORMAT = 1
FILES = {
    "model": ("model.safetensors",),
    "optimizer": ("optimizer.safetensors",),
    "extra": ("extra.json", "extra.safetensors"),
    "hf_model": (),
}


def save_engine(engine: "TorchEngine", folder: Path, contents: tuple[str, ...]) -> None:
    """Write `contents` of `engine` into `folder`."""
    _check_contents(contents, "save_contents")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # until the new one is written the folder is incomplete
    if "model" in contents:
        save_file(model_tensors(engine), folder / "model.safetensors")
    if "optimizer" in contents:
        save_file(_optimizer_tensors(engine), folder / "optimizer.safetensors")
    if "extra" in contents:
        _save_extra(engine, folder)
    export_config_and_tokenizer(engine.model, engine.model_config, folder / "huggingface")
    if "hf_model" in contents:
        export_model(
            engine.model, dict(engine.export_weights()), folder / "huggingface", engine.checkpoint_config.verify
        )
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    manifest = {
        "format": FORMAT,
        "contents": list(contents),
        "model": type(engine.model).__name__,
        "files": {p.relative_to(folder).as_posix(): file_digest(p) for p in files},
    }
    atomic_write_text(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")


def load_engine(engine: "TorchEngine", folder: Path, contents: tuple[str, ...]) -> None:
    """Restore `contents` from `folder`. Everything is read and checked before anything in the engine changes."""
    _check_contents(contents, "load_contents")
    wanted = [name for name in contents if name != "hf_model" and not (name == "optimizer" and not engine.trains)]
    manifest = read_manifest(folder)
    lacking = [name for name in wanted if name not in manifest["contents"]]
    if lacking:
        raise CheckpointError(
            f"{folder} holds {', '.join(manifest['contents'])}, not {', '.join(lacking)}; resume from a checkpoint "
            f"that does, or leave it out: checkpoint.load_contents=[{','.join(n for n in wanted if n not in lacking)}]"
        )
    for part in wanted:
        for name in FILES[part]:
            verify_file(folder, name, manifest)
    parts = {part: _read(folder, part, engine.device) for part in wanted}
    if "model" in wanted:
        _check_tensors(model_tensors(engine), parts["model"], folder / "model.safetensors")
    if "optimizer" in wanted:
        _check_optimizer(engine, parts["optimizer"], folder)
    for part in wanted:
        _RESTORE[part](engine, parts[part])


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says it holds; an error when it was never finished or is of an unknown format."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is no engine checkpoint, or saving it never finished")
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON ({error}); use another checkpoint") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')!r}; this version reads {FORMAT}")
    return manifest


def verify_file(folder: Path, name: str, manifest: dict[str, Any]) -> None:
    """Refuses a file that is missing or whose bytes are not those that were saved."""
    path, expected = folder / name, manifest["files"].get(name)
    if expected is None or not path.is_file():
        raise CheckpointError(f"{path} is missing; the checkpoint is incomplete, use another one")
    found = file_digest(path)
    if found != expected:
        raise CheckpointError(
            f"{path} is damaged: its sha256 is {found[:16]}…, the manifest says {expected[:16]}…; use another "
            "checkpoint"
        )


def file_digest(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_tensors(engine: "TorchEngine") -> dict[str, Tensor]:
    """Trained parameters and persistent buffers on the CPU, by name, each owning its memory."""
    tensors = dict(engine.export_weights())
    tensors.update(_persistent_buffers(engine.model))
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _optimizer_tensors(engine: "TorchEngine") -> dict[str, Tensor]:
    if engine.optimizer is None:
        raise CheckpointError("the engine has no optimiser to save; leave it out of checkpoint.save_contents")
    out: dict[str, Tensor] = {}
    for name, parameter in engine.weights.named:
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            out[f"{name}|{key}"] = tensor.cpu().contiguous()
    return out


def _save_extra(engine: "TorchEngine", folder: Path) -> None:
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    extra = {
        "schedule": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "skipped_steps": engine.skipped_steps,
        "python_rng": [version, list(internal), gauss],
        "numpy_rng": [name, [int(k) for k in keys], int(position), int(has_gauss), float(cached)],
    }
    generators = {"cpu": torch.get_rng_state()}
    if engine.device.type != "cpu":
        generators["device"] = torch.get_device_module(engine.device).get_rng_state().cpu()
    atomic_write_text(folder / "extra.json", json.dumps(extra))
    save_file(generators, folder / "extra.safetensors")


def _read(folder: Path, part: str, device: torch.device) -> Any:
    if part == "extra":
        generators = load_file(folder / "extra.safetensors")
        if device.type != "cpu" and "device" not in generators:
            raise CheckpointError(
                f"{folder} was saved on a CPU and holds no generator state for {device.type}; resume on the same kind "
                "of device, or leave extra out of checkpoint.load_contents"
            )
        return json.loads((folder / "extra.json").read_text()), generators
    return load_file(folder / f"{part}.safetensors")


def _check_tensors(here: dict[str, Tensor], there: dict[str, Tensor], path: Path) -> None:
    missing, unknown = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    differences = [f"{name} is missing" for name in missing] + [f"{name} is not in the model" for name in unknown]
    for name in sorted(here.keys() & there.keys()):
        ours, theirs = here[name], there[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            differences.append(
                f"{name} is {theirs.dtype} {tuple(theirs.shape)}, the model's {ours.dtype} {tuple(ours.shape)}"
            )
    if differences:
        raise CheckpointError(
            f"{path} does not fit the model, {len(differences)} tensors differ: {'; '.join(differences[:5])}. "
            "Use the model and the types (model_dtype) of the run that saved it"
        )


def _check_optimizer(engine: "TorchEngine", tensors: dict[str, Tensor], folder: Path) -> None:
    shapes = {name: parameter.shape for name, parameter in engine.weights.named}
    for full_name, tensor in tensors.items():
        name = full_name.rpartition("|")[0]
        if name not in shapes or (tensor.dim() > 0 and tensor.shape != shapes[name]):
            raise CheckpointError(
                f"{folder}/optimizer.safetensors: {full_name} {tuple(tensor.shape)} fits no parameter of the model; "
                "resume with the model and optim.optimizer that saved it"
            )


@torch.no_grad()
def _restore_model(engine: "TorchEngine", tensors: dict[str, Tensor]) -> None:
    for name, value in (*engine.export_weights(), *_persistent_buffers(engine.model).items()):
        value.copy_(tensors[name])
    engine.weights.publish()


def _restore_optimizer(engine: "TorchEngine", tensors: dict[str, Tensor]) -> None:
    assert engine.optimizer is not None
    index = {id(p): i for i, p in enumerate(p for g in engine.optimizer.param_groups for p in g["params"])}
    state: dict[int, dict[str, Tensor]] = {}
    by_name = {name: index[id(p)] for name, p in engine.weights.named if id(p) in index}
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition("|")
        state.setdefault(by_name[name], {})[key] = tensor
    groups = engine.optimizer.state_dict()["param_groups"]
    engine.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _restore_extra(engine: "TorchEngine", saved: tuple[dict[str, Any], dict[str, Tensor]]) -> None:
    extra, generators = saved
    if engine.lr_scheduler is not None and extra["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(extra["schedule"])
    engine.skipped_steps = int(extra["skipped_steps"])
    version, internal, gauss = extra["python_rng"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = extra["numpy_rng"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(generators["cpu"])
    if engine.device.type != "cpu":
        torch.get_device_module(engine.device).set_rng_state(generators["device"])


_RESTORE = {"model": _restore_model, "optimizer": _restore_optimizer, "extra": _restore_extra}


def _check_contents(contents: tuple[str, ...], key: str) -> None:
    unknown = [name for name in contents if name not in CONTENTS]
    if unknown:
        raise ConfigError(f"checkpoint.{key} has {unknown[0]!r}; allowed: {', '.join(CONTENTS)}")
