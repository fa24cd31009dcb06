"""An engine's checkpoint: safetensors and JSON, a digest of every file, nothing pickled, read by any number of ranks.

    <folder>/model_world_size_W_rank_R.safetensors        what rank R holds of parameters and persistent buffers
    <folder>/optim_world_size_W_rank_R.safetensors        the same of "<parameter>|<state>", step counts included
    <folder>/extra_state_world_size_W_rank_R.json         random number generators (Python, NumPy); rank 0: schedule
    <folder>/extra_state_world_size_W_rank_R.safetensors  torch generators
    <folder>/lora_adapter/                                adapters as peft reads them, where the model has any
    <folder>/huggingface/                                 config and tokenizer; with hf_model the weights too
    <folder>/manifest.json                                sha256 of every file, where each tensor lies; written last

Whoever saves several roles at once makes the folder atomic (`verl.trainer.checkpoints`).
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.models import export, lora
from verl.models.tensor_file import file_digest, write_tensors
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import atomic_write_text
from verl.utils.sealed import read_sealed, write_sealed
from verl.workers.engine import rng
from verl.workers.engine.manifest import FORMAT, MANIFEST, DamagedCheckpoint, read_manifest, verify_files
from verl.workers.engine.saving import Saving, handed_over
from verl.workers.engine.shards import Held, Index, Reader, from_json, held, merge, to_json, to_save

if TYPE_CHECKING:
    from verl.workers.engine.torch_engine import TorchEngine

CONTENTS = ("model", "optimizer", "extra", "hf_model")
PREFIX = {"model": "model", "optimizer": "optim", "extra": "extra_state"}
HUGGINGFACE, ADAPTERS = "huggingface", "lora_adapter"

Work = Callable[[], dict[str, Any]]  # writes files; what the manifest must know of them
Check = Callable[[dict[str, str]], None]  # of the digests of the files that all ranks have written


# --- saving ---------------------------------------------------------------------------------------------------------


def save_engine(engine: "TorchEngine", folder: Path, contents: tuple[str, ...]) -> None:
    """Write `contents` of `engine` into `folder`, or begin to: `finish_save` completes a save in the background.

    A collective. Every rank writes what it holds and its own files of the Hugging Face folder; only that gathers
    anything, one layer at a time. In the background a rank works from a copy in host memory of what it writes.
    """
    _check_contents(contents, "save_contents")
    if "optimizer" in contents and engine.optimizer is None:
        raise CheckpointError("the engine has no optimiser to save; leave it out of checkpoint.save_contents")
    adapters = lora.has_adapters(engine.model)
    if adapters and engine.checkpoint_config.save_lora_only:
        contents = tuple(part for part in contents if part != "hf_model")
    finish_save(engine, wait=True)
    if engine.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MANIFEST).unlink(missing_ok=True)  # until the new one is written the folder is incomplete
        export.export_config_and_tokenizer(engine.model, engine.model_config, folder / HUGGINGFACE)
    engine.ranks.least(0, engine.device)  # the folder is there
    background = engine.checkpoint_config.async_save
    work: list[Work] = []
    if "model" in contents:
        work.append(_saves(engine, folder, "model", model_tensors(engine), background))
    if "optimizer" in contents:
        work.append(_saves(engine, folder, "optimizer", optimizer_tensors(engine), background))
    if "extra" in contents:
        work.append(_saves_extra(engine, folder))
    if adapters:
        work.append(_saves_adapters(engine, folder / ADAPTERS))
    about = {"contents": contents, "world_size": engine.world_size, "optimizer": type(engine.optimizer).__name__}
    seal = partial(_seal, folder, about)
    layers: Iterator[Any] = iter(())
    if "hf_model" in contents:
        writes, check, layers = _exports(engine, folder / HUGGINGFACE, background)
        work.append(writes)
        seal = partial(_seal, folder, about, check)
    engine.saving = Saving(partial(_write_rank, folder, engine.rank, work), seal)
    engine.saving.start(background)
    if not background:
        for _ in layers:  # left by a rank that failed: the others wait for its part in gathering them
            pass
        finish_save(engine, wait=True)


def finish_save(engine: "TorchEngine", wait: bool) -> bool:
    """Whether no save is under way any more. A collective; the error of a save that failed is raised here."""
    saving = engine.saving
    if saving is None:
        return True
    state = engine.ranks.least(saving.state(wait), engine.device)
    if state == Saving.RUNNING:
        return False
    engine.saving = None
    if state == Saving.DONE and engine.rank == 0:
        saving.attempt(saving.seal)
    if engine.ranks.least(saving.state(wait=True), engine.device) == Saving.FAILED:
        saving.raise_error(engine.ranks.texts(saving.reason()))
    return True


def _saves(engine: "TorchEngine", folder: Path, part: str, tensors: dict[str, Held], copy: bool) -> Work:
    file = _file_name(part, engine.world_size, engine.rank)
    local, index = to_save(tensors, file)
    if copy:
        local = {key: tensor.to("cpu", copy=True) for key, tensor in local.items()}

    def work() -> dict[str, Any]:
        digest = write_tensors(folder / file, local)
        local.clear()
        return {"files": {file: digest}, "tensors": {part: to_json(index)}}

    return work


def _saves_extra(engine: "TorchEngine", folder: Path) -> Work:
    numbers, generators = rng.generator_states(engine.device)
    if engine.rank == 0:
        numbers["schedule"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
        numbers["skipped_steps"] = engine.skipped_steps
    file = _file_name("extra", engine.world_size, engine.rank)
    text = Path(file).with_suffix(".json").name

    def work() -> dict[str, Any]:
        atomic_write_text(folder / text, json.dumps(numbers))
        return {"files": {file: write_tensors(folder / file, generators), text: file_digest(folder / text)}}

    return work


def _saves_adapters(engine: "TorchEngine", folder: Path) -> Work:
    """Rank 0 writes the adapters whole, after a collective that gathers one parameter at a time."""
    trained = {name for name, parameter in engine.weights.named if parameter.requires_grad}
    whole = {
        lora.file_name(name): tensor.to("cpu", copy=True).contiguous()
        for name, tensor in engine.weights.full_tensors()
        if name in trained and engine.rank == 0
    }

    def work() -> dict[str, Any]:
        if engine.rank > 0:
            return {}
        lora.write_settings(engine.model, folder)
        digest = write_tensors(folder / lora.WEIGHTS, whole)
        settings = {f"{ADAPTERS}/{path.name}": file_digest(path) for path in folder.iterdir()}
        return {"files": {**settings, f"{ADAPTERS}/{lora.WEIGHTS}": digest}}

    return work


def _exports(engine: "TorchEngine", folder: Path, copy: bool) -> tuple[Work, Check, Iterator[Any]]:
    """What writes this rank's files of the Hugging Face folder, and the layers: each a collective, unless copied."""
    buffers = persistent_buffers(engine)
    plain = {name: t for full, t in engine.weights.structure().items() if (name := lora.plain_name(full))}
    shapes = {**plain, **buffers}
    plan = export.plan_export(engine.model, shapes, engine.rank, engine.world_size)
    reload = plan.wants_reload(engine.checkpoint_config.verify)
    logits = None
    if reload:
        with engine.eval_mode():
            logits = export.probe_logits(engine.model)
            engine.weights.rest()
    layers = plan.layers(chain(engine.export_weights(), buffers.items()))
    if copy:
        on_host = [(file, {n: t.to("cpu", copy=True) for n, t in layer.items()}) for file, layer in layers]
        layers = handed_over(on_host)

    def work() -> dict[str, Any]:
        written = export.write_layers(plan, layers, folder, reload)
        files = {f"{HUGGINGFACE}/{name}": digest for name, digest in written.files.items()}
        return {"files": files, "exported": written.tensors}

    def check(digests: dict[str, str]) -> None:
        if logits is not None:
            reloaded = export.reload(plan, digests, folder, next(iter(shapes.values())).dtype)
            export.compare_logits(reloaded, logits, folder)

    return work, check, layers


def _write_rank(folder: Path, rank: int, work: list[Work]) -> None:
    """Do all `work`, then say what was written in a file for rank 0."""
    said: dict[str, Any] = {"files": {}, "tensors": {}, "exported": {}}
    while work:
        for key, value in work.pop(0)().items():
            said[key].update(value)
    write_sealed(_said_by(folder, rank), said)


def _said_by(folder: Path, rank: int) -> Path:
    return folder / f"written_by_rank_{rank}.json"


def _seal(folder: Path, about: dict[str, Any], check: Check | None = None) -> None:
    """Write the manifest from what all ranks say they wrote."""
    said = [read_sealed(_said_by(folder, rank)) for rank in range(about["world_size"])]
    if check is not None:
        check({name: digest for one in said for name, digest in one["exported"].items()})
    files = {name: digest for one in said for name, digest in one["files"].items()}
    for path in sorted((folder / HUGGINGFACE).iterdir()):
        name = f"{HUGGINGFACE}/{path.name}"
        files[name] = files.get(name) or file_digest(path)
    parts = {part: merge([from_json(one["tensors"][part]) for one in said]) for part in said[0]["tensors"]}
    manifest = {
        "format": FORMAT,
        **about,
        "files": files,
        "tensors": {part: to_json(index) for part, index in parts.items()},
    }
    write_sealed(folder / MANIFEST, manifest)
    for rank in range(about["world_size"]):
        _said_by(folder, rank).unlink()


def _file_name(part: str, world_size: int, rank: int) -> str:
    return f"{PREFIX[part]}_world_size_{world_size}_rank_{rank}.safetensors"


# --- what is saved --------------------------------------------------------------------------------------------------


def model_tensors(engine: "TorchEngine") -> dict[str, Held]:
    """Parameters (tied ones once) and persistent buffers, or what is trained alone; as this rank holds them."""
    alone = engine.checkpoint_config.save_lora_only and lora.has_adapters(engine.model)
    kept = [(name, parameter) for name, parameter in engine.weights.named if parameter.requires_grad or not alone]
    buffers = {} if alone else persistent_buffers(engine)
    parameters = {name: engine.weights.held(name, parameter) for name, parameter in kept}
    return {**parameters, **{name: held(buffer, engine.rank) for name, buffer in buffers.items()}}


def persistent_buffers(engine: "TorchEngine") -> dict[str, Tensor]:
    """The model's buffers that belong to its state; whole on every rank."""
    return {
        engine.weights.plain_name(f"{prefix}.{name}" if prefix else name): buffer
        for prefix, module in engine.model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def optimizer_tensors(engine: "TorchEngine") -> dict[str, Held]:
    """Optimiser state by "<parameter>|<state>", as this rank holds it."""
    assert engine.optimizer is not None
    out: dict[str, Held] = {}
    for name, parameter in engine.weights.named:
        for key, value in engine.weights.state_of(engine.optimizer, parameter).items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            out[f"{name}|{key}"] = engine.weights.held(name, tensor)
    return out


# --- loading --------------------------------------------------------------------------------------------------------


def load_engine(engine: "TorchEngine", folder: Path, contents: tuple[str, ...]) -> None:
    """Restore `contents` from `folder`, each rank its part. Everything is checked before anything changes."""
    _check_contents(contents, "load_contents")
    finish_save(engine, wait=True)
    wanted = [name for name in contents if name != "hf_model" and not (name == "optimizer" and not engine.trains)]
    manifest = read_manifest(folder)
    lacking = [name for name in wanted if name not in manifest["contents"]]
    if lacking:
        rest = f"leave it out: checkpoint.load_contents=[{','.join(n for n in wanted if n not in lacking)}]"
        if "model" in lacking:  # left out, a run would go on from the weights it began with
            rest = f"begin anew from its Hugging Face folder, if it has one: model.path={folder / HUGGINGFACE}"
        there = ", ".join(manifest["contents"])
        missing = f"{folder} holds {there}, not {', '.join(lacking)}"
        raise CheckpointError(f"{missing}; resume from a checkpoint that does, or {rest}")
    ours = type(engine.optimizer).__name__
    if "optimizer" in wanted and manifest.get("optimizer", ours) != ours:
        raise CheckpointError(
            f"{folder} holds the state of {manifest['optimizer']}, not of optim.optimizer={ours}; set it back, or "
            f"begin without: checkpoint.load_contents=[{','.join(n for n in wanted if n != 'optimizer')}]"
        )
    _verify(engine, folder, wanted, manifest)
    indices = {part: from_json(index) for part, index in manifest["tensors"].items() if part in wanted}
    for part, index in indices.items():
        _check_complete(index, folder, part)
    if "model" in wanted:
        lora.check_scale(engine.model, folder / ADAPTERS)
        _check_fits(model_tensors(engine), indices["model"], folder)
    if "optimizer" in wanted:
        _check_optimizer(engine, indices["optimizer"], folder)
    extra = _read_extra(engine, folder, manifest["world_size"]) if "extra" in wanted else None
    if "model" in wanted:
        _restore_model(engine, Reader(folder, indices["model"]))
    if "optimizer" in wanted:
        _restore_optimizer(engine, Reader(folder, indices["optimizer"]))
    if extra is not None:
        _restore_extra(engine, *extra)


def _verify(engine: "TorchEngine", folder: Path, wanted: list[str], manifest: dict[str, Any]) -> None:
    """Check the digests of all files of `wanted` parts, the ranks sharing the work."""
    prefixes = tuple(f"{PREFIX[part]}_world_size_" for part in wanted)
    names = sorted(name for name in manifest["files"] if name.startswith(prefixes))
    checking = Saving(partial(verify_files, folder, names[engine.rank :: engine.world_size], manifest), lambda: None)
    checking.start(background=False)
    if engine.ranks.least(checking.state(wait=True), engine.device) == Saving.FAILED:
        checking.raise_error(engine.ranks.texts(checking.reason()))


def _check_complete(index: Index, folder: Path, part: str) -> None:
    for name, entry in index.items():
        if entry.missing:
            raise DamagedCheckpoint(
                f"{folder}/{MANIFEST} lacks {entry.missing} elements of {part} tensor {name}; use another checkpoint"
            )


def _check_fits(here: dict[str, Held], there: Index, folder: Path) -> None:
    missing, unknown = sorted(here.keys() - there.keys()), sorted(there.keys() - here.keys())
    differences = [f"{name} is missing" for name in missing] + [f"{name} is not in the model" for name in unknown]
    for name in sorted(here.keys() & there.keys()):
        ours, theirs = here[name], there[name]
        if ours.shape != tuple(theirs.shape) or ours.local.dtype != theirs.torch_dtype:
            differences.append(
                f"{name} is {theirs.torch_dtype} {tuple(theirs.shape)}, the model's {ours.local.dtype} {ours.shape}"
            )
    if differences:
        raise CheckpointError(
            f"{folder} does not fit the model, {len(differences)} tensors differ: {'; '.join(differences[:5])}. "
            "Use the model and the types (model_dtype) of the run that saved it"
        )


def _check_optimizer(engine: "TorchEngine", index: Index, folder: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.weights.structure().items()}
    for full_name, entry in index.items():
        name = full_name.rpartition("|")[0]
        if name not in shapes or (entry.shape and tuple(entry.shape) != shapes[name]):
            raise CheckpointError(
                f"{folder}: optimiser state {full_name} {tuple(entry.shape)} fits no parameter of the model; resume "
                "with the model and optim.optimizer that saved it"
            )


@torch.no_grad()
def _restore_model(engine: "TorchEngine", reader: Reader) -> None:
    for name, mine in model_tensors(engine).items():
        reader.fill(name, mine)
    engine.weights.publish()


def _restore_optimizer(engine: "TorchEngine", reader: Reader) -> None:
    optimizer = engine.optimizer
    assert optimizer is not None
    index = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    parameters = dict(engine.weights.named)
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, entry in reader.index.items():
        name, _, key = full_name.rpartition("|")
        parameter = parameters[name]
        value = _empty_like(parameter, entry.torch_dtype) if entry.shape else torch.empty((), dtype=entry.torch_dtype)
        reader.fill(full_name, engine.weights.held(name, value))
        state.setdefault(index[id(parameter)], {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _empty_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor sharded like a parameter."""
    return torch.empty_like(parameter.detach(), dtype=dtype)


Extra = tuple[dict[str, Any], dict[str, Any] | None, dict[str, Tensor]]


def _read_extra(engine: "TorchEngine", folder: Path, saved_by: int) -> Extra:
    """(What rank 0 saved, this rank's own generators where as many ranks saved as load, their tensors)."""
    first = json.loads((folder / _file_name("extra", saved_by, 0)).with_suffix(".json").read_text())
    if saved_by != engine.world_size:
        return first, None, {}
    path = folder / _file_name("extra", saved_by, engine.rank)
    generators = rng.read(path)
    rng.check_generator_states(generators, engine.device)
    return first, json.loads(path.with_suffix(".json").read_text()), generators


def _restore_extra(
    engine: "TorchEngine", first: dict[str, Any], numbers: dict[str, Any] | None, generators: dict[str, Tensor]
) -> None:
    if engine.lr_scheduler is not None and first["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(first["schedule"])
    engine.skipped_steps = int(first["skipped_steps"])
    if numbers is not None:
        rng.restore_generators(numbers, generators, engine.device)
    else:
        rng.derive_generators(json.dumps(first["python_rng"]), engine.rank, engine.world_size)


def _check_contents(contents: tuple[str, ...], key: str) -> None:
    unknown = [name for name in contents if name not in CONTENTS]
    if unknown:
        raise ConfigError(f"checkpoint.{key} has {unknown[0]!r}; allowed: {', '.join(CONTENTS)}")
