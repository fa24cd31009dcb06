"""An engine's checkpoint: safetensors and JSON, a digest of every file, nothing pickled, loads on any number of ranks.

    <folder>/model_world_size_W_rank_R.safetensors        rank R's shards of parameters and persistent buffers
    <folder>/optim_world_size_W_rank_R.safetensors        its shards of "<parameter>|<state>", with step counts
    <folder>/extra_state_world_size_W_rank_R.json         random number generators (Python, NumPy); rank 0: schedule
    <folder>/extra_state_world_size_W_rank_R.safetensors  torch generators
    <folder>/lora_adapter/                                adapters as peft reads them, if the model has any
    <folder>/huggingface/                                 config and tokenizer; with hf_model the weights too
    <folder>/manifest.json                                sha256 of every file, where each tensor lies; written last

The caller, which saves several roles at once, makes the folder atomic (`verl.trainer.run.checkpoints`).
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from verl.models import export, lora
from verl.models.tensor_file import file_digest, write_tensors
from verl.utils.checksummed import read_checksummed, write_checksummed
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import atomic_write_text
from verl.workers.engine import rng
from verl.workers.engine.checkpoint_tensors import model_tensors, optimizer_tensors, persistent_buffers
from verl.workers.engine.collective_save import CollectiveSave, drain
from verl.workers.engine.manifest import (
    FORMAT,
    HUGGINGFACE,
    MANIFEST,
    DamagedCheckpointError,
    read_manifest,
    verify_files,
)
from verl.workers.engine.save_trial import ADAPTERS, files_beside_tensors, plan_of_export
from verl.workers.engine.tensor_shards import (
    LocalShard,
    ShardIndex,
    ShardReader,
    index_from_json,
    index_to_json,
    local_shard,
    merge_indices,
    tensors_to_save,
)

if TYPE_CHECKING:
    from verl.workers.engine.torch_engine import TorchEngine

CONTENTS = ("model", "optimizer", "extra", "hf_model")
PREFIX = {"model": "model", "optimizer": "optim", "extra": "extra_state"}

WriteTask = Callable[[], dict[str, Any]]  # writes files; returns their entries for the manifest
DigestCheck = Callable[[dict[str, str]], None]  # takes the digests of the files that all ranks have written


# --- saving ---------------------------------------------------------------------------------------------------------


def save_engine(engine: "TorchEngine", folder: Path, contents: tuple[str, ...]) -> None:
    """Write `contents` of `engine` into `folder`, or start to: `finish_save` completes a background save.

    A collective. Every rank writes its shards and its own files of the Hugging Face folder, whose tensors are gathered
    one layer at a time. A background save writes from a copy in host memory.
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
        (folder / MANIFEST).unlink(missing_ok=True)  # without a manifest the folder is incomplete
        for name, content in (engine.files_to_save or files_beside_tensors(engine)).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
    engine.rank_mesh.min_over_ranks(0, engine.device)  # barrier: the folder exists
    background = engine.checkpoint_config.async_save
    tasks: list[WriteTask] = []
    if "model" in contents:
        tasks.append(_shard_write_task(engine, folder, "model", model_tensors(engine), background))
    if "optimizer" in contents:
        tasks.append(_shard_write_task(engine, folder, "optimizer", optimizer_tensors(engine), background))
    if "extra" in contents:
        tasks.append(_extra_write_task(engine, folder))
    if adapters:
        tasks.append(_adapter_write_task(engine, folder / ADAPTERS))
    header = {"contents": contents, "world_size": engine.world_size, "optimizer": type(engine.optimizer).__name__}
    finalize = partial(_check_and_write_manifest, folder, header)
    layers: Iterator[Any] = iter(())
    if "hf_model" in contents:
        write_task, check, layers = _export_write_task(engine, folder / HUGGINGFACE, background)
        tasks.append(write_task)
        finalize = partial(_check_and_write_manifest, folder, header, check)
    engine.pending_save = CollectiveSave(partial(_write_rank, folder, engine.rank, tasks), finalize)
    engine.pending_save.start(background)
    if not background:
        for _ in layers:  # left after a failure on this rank: the other ranks wait in their all-gathers
            pass
        finish_save(engine, wait=True)


def finish_save(engine: "TorchEngine", wait: bool) -> bool:
    """True once no save is running. A collective; raises the error of a failed save."""
    save = engine.pending_save
    if save is None:
        return True
    state = engine.rank_mesh.min_over_ranks(save.state(wait), engine.device)
    if state == CollectiveSave.RUNNING:
        return False
    engine.pending_save = None
    if state == CollectiveSave.DONE and engine.rank == 0:
        save.attempt(save.finalize)
    if engine.rank_mesh.min_over_ranks(save.state(wait=True), engine.device) == CollectiveSave.FAILED:
        save.raise_error(engine.rank_mesh.gather_texts(save.error_text()))
    return True


def _shard_write_task(
    engine: "TorchEngine", folder: Path, part: str, tensors: dict[str, LocalShard], copy: bool
) -> WriteTask:
    file = _file_name(part, engine.world_size, engine.rank)
    local, index = tensors_to_save(tensors, file)
    if copy:
        local = {key: tensor.to("cpu", copy=True) for key, tensor in local.items()}

    def write() -> dict[str, Any]:
        digest = write_tensors(folder / file, local)
        local.clear()
        return {"files": {file: digest}, "tensors": {part: index_to_json(index)}}

    return write


def _extra_write_task(engine: "TorchEngine", folder: Path) -> WriteTask:
    numbers, generators = rng.generator_states(engine.device)
    if engine.rank == 0:
        numbers["schedule"] = engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None
        numbers["skipped_steps"] = engine.skipped_steps
    file = _file_name("extra", engine.world_size, engine.rank)
    text = Path(file).with_suffix(".json").name

    def write() -> dict[str, Any]:
        atomic_write_text(folder / text, json.dumps(numbers))
        return {"files": {file: write_tensors(folder / file, generators), text: file_digest(folder / text)}}

    return write


def _adapter_write_task(engine: "TorchEngine", folder: Path) -> WriteTask:
    """Rank 0 writes the full adapters, after a collective that gathers one parameter at a time."""
    adapters = {
        lora.adapter_key(name): tensor.to("cpu", copy=True).contiguous()
        for name, tensor in engine.weights.full_tensors(trained_only=True)
        if engine.rank == 0
    }

    def write() -> dict[str, Any]:
        if engine.rank > 0:
            return {}
        digest = write_tensors(folder / lora.ADAPTER_WEIGHTS, adapters)
        settings = {f"{ADAPTERS}/{path.name}": file_digest(path) for path in folder.iterdir()}
        return {"files": {**settings, f"{ADAPTERS}/{lora.ADAPTER_WEIGHTS}": digest}}

    return write


def _export_write_task(engine: "TorchEngine", folder: Path, copy: bool) -> tuple[WriteTask, DigestCheck, Iterator[Any]]:
    """The write task of this rank's Hugging Face files, their check, and the layers: collectives unless copied."""
    plan, shapes = plan_of_export(engine)
    buffers = persistent_buffers(engine)
    reload = plan.wants_reload(engine.checkpoint_config.verify)
    logits = None
    if reload:
        with engine.eval_mode():
            logits = export.fixed_token_logits(engine.model)
            engine.weights.reshard()
    layers = plan.own_layers(chain(engine.export_weights(), buffers.items()))
    if copy:
        on_host = [(file, {n: t.to("cpu", copy=True) for n, t in layer.items()}) for file, layer in layers]
        layers = drain(on_host)

    def write() -> dict[str, Any]:
        written = export.write_layers(plan, layers, folder, reload)
        files = {f"{HUGGINGFACE}/{name}": digest for name, digest in written.files.items()}
        return {"files": files, "exported": written.tensors}

    def check(digests: dict[str, str]) -> None:
        if logits is not None:
            reloaded = export.reload_export(plan, digests, folder, next(iter(shapes.values())).dtype)
            export.compare_logits(reloaded, logits, folder)

    return write, check, layers


def _write_rank(folder: Path, rank: int, tasks: list[WriteTask]) -> None:
    """Run all `tasks`, then write a report of the files for rank 0."""
    report: dict[str, Any] = {"files": {}, "tensors": {}, "exported": {}}
    while tasks:
        for key, value in tasks.pop(0)().items():
            report[key].update(value)
    write_checksummed(_report_path(folder, rank), report)


def _report_path(folder: Path, rank: int) -> Path:
    return folder / f"written_by_rank_{rank}.json"


def _check_and_write_manifest(folder: Path, header: dict[str, Any], check: DigestCheck | None = None) -> None:
    """Write the manifest from the reports of all ranks, after `check` of the export; then delete the reports."""
    reports = [read_checksummed(_report_path(folder, rank)) for rank in range(header["world_size"])]
    if check is not None:
        check({name: digest for report in reports for name, digest in report["exported"].items()})
    files = {name: digest for report in reports for name, digest in report["files"].items()}
    for path in sorted((folder / HUGGINGFACE).iterdir()):
        name = f"{HUGGINGFACE}/{path.name}"
        files[name] = files.get(name) or file_digest(path)
    parts = {
        part: merge_indices([index_from_json(report["tensors"][part]) for report in reports])
        for part in reports[0]["tensors"]
    }
    manifest = {
        "format": FORMAT,
        **header,
        "files": files,
        "tensors": {part: index_to_json(index) for part, index in parts.items()},
    }
    write_checksummed(folder / MANIFEST, manifest)
    for rank in range(header["world_size"]):
        _report_path(folder, rank).unlink()


def _file_name(part: str, world_size: int, rank: int) -> str:
    return f"{PREFIX[part]}_world_size_{world_size}_rank_{rank}.safetensors"


# --- loading --------------------------------------------------------------------------------------------------------


def load_engine(engine: "TorchEngine", folder: Path, contents: tuple[str, ...]) -> None:
    """Restore this rank's part of `contents` from `folder`. Everything is checked before anything changes.

    A collective, which first waits for a save that is running.
    """
    _check_contents(contents, "load_contents")
    finish_save(engine, wait=True)
    wanted = [name for name in contents if name != "hf_model" and not (name == "optimizer" and not engine.trains)]
    manifest = read_manifest(folder)
    absent = [name for name in wanted if name not in manifest["contents"]]
    if absent:
        advice = f"leave it out: checkpoint.load_contents=[{','.join(n for n in wanted if n not in absent)}]"
        if "model" in absent:  # without it a run would continue from its initial weights
            advice = f"start a new run from its Hugging Face folder, if it has one: model.path={folder / HUGGINGFACE}"
        problem = f"{folder} holds {', '.join(manifest['contents'])}, not {', '.join(absent)}"
        raise CheckpointError(f"{problem}; resume from a checkpoint that does, or {advice}")
    current = type(engine.optimizer).__name__
    if "optimizer" in wanted and manifest.get("optimizer", current) != current:
        raise CheckpointError(
            f"{folder} holds the state of {manifest['optimizer']}, not of optim.optimizer={current}; set it back, or "
            f"resume without it: checkpoint.load_contents=[{','.join(n for n in wanted if n != 'optimizer')}]"
        )
    _verify_files_on_all_ranks(engine, folder, wanted, manifest)
    indices = {part: index_from_json(index) for part, index in manifest["tensors"].items() if part in wanted}
    for part, index in indices.items():
        _check_complete(index, folder, part)
    if "model" in wanted:
        lora.check_adapter_scale(engine.model, folder / ADAPTERS)
        _check_fits(model_tensors(engine), indices["model"], folder)
    if "optimizer" in wanted:
        _check_optimizer(engine, indices["optimizer"], folder)
    extra = _read_extra(engine, folder, manifest["world_size"]) if "extra" in wanted else None
    if "model" in wanted:
        _restore_model(engine, ShardReader(folder, indices["model"]))
    if "optimizer" in wanted:
        _restore_optimizer(engine, ShardReader(folder, indices["optimizer"]))
    if extra is not None:
        _restore_extra(engine, extra)


def _verify_files_on_all_ranks(
    engine: "TorchEngine", folder: Path, wanted: list[str], manifest: dict[str, Any]
) -> None:
    """Check the digests of all files of `wanted` parts; each rank checks some of the files. A collective."""
    prefixes = tuple(f"{PREFIX[part]}_world_size_" for part in wanted)
    names = sorted(name for name in manifest["files"] if name.startswith(prefixes))
    checking = CollectiveSave(
        partial(verify_files, folder, names[engine.rank :: engine.world_size], manifest), lambda: None
    )
    checking.start(background=False)
    if engine.rank_mesh.min_over_ranks(checking.state(wait=True), engine.device) == CollectiveSave.FAILED:
        checking.raise_error(engine.rank_mesh.gather_texts(checking.error_text()))


def _check_complete(index: ShardIndex, folder: Path, part: str) -> None:
    for name, entry in index.items():
        if entry.num_missing:
            raise DamagedCheckpointError(
                f"{folder}/{MANIFEST} lacks {entry.num_missing} elements of {part} tensor {name}; use "
                "another checkpoint"
            )


def _check_fits(local: dict[str, LocalShard], saved: ShardIndex, folder: Path) -> None:
    missing, unknown = sorted(local.keys() - saved.keys()), sorted(saved.keys() - local.keys())
    differences = [f"{name} is missing" for name in missing] + [f"{name} is not in the model" for name in unknown]
    for name in sorted(local.keys() & saved.keys()):
        shard, stored = local[name], saved[name]
        if shard.shape != tuple(stored.shape) or shard.local.dtype != stored.torch_dtype:
            differences.append(
                f"{name} is {stored.torch_dtype} {tuple(stored.shape)}, the model's {shard.local.dtype} {shard.shape}"
            )
    if differences:
        raise CheckpointError(
            f"{folder} does not fit the model, {len(differences)} tensors differ: {'; '.join(differences[:5])}. "
            "Use the model and the types (model_dtype) of the run that saved it"
        )


def _check_optimizer(engine: "TorchEngine", index: ShardIndex, folder: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in engine.weights.named_parameters}
    for full_name, entry in index.items():
        name = full_name.rpartition("|")[0]
        if name not in shapes or (entry.shape and tuple(entry.shape) != shapes[name]):
            raise CheckpointError(
                f"{folder}: optimiser state {full_name} {tuple(entry.shape)} fits no parameter of the model; resume "
                "with the model and optim.optimizer that saved it"
            )


@torch.no_grad()
def _restore_model(engine: "TorchEngine", reader: ShardReader) -> None:
    for name, local in model_tensors(engine).items():
        reader.read_into(name, local)
    engine.weights.copy_to_model()


def _restore_optimizer(engine: "TorchEngine", reader: ShardReader) -> None:
    optimizer = engine.optimizer
    assert optimizer is not None
    index = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    parameters = dict(engine.weights.named_parameters)
    state: dict[int, dict[str, Tensor]] = {}
    for full_name, entry in reader.index.items():
        name, _, key = full_name.rpartition("|")
        parameter = parameters[name]
        value = _empty_like(parameter, entry.torch_dtype) if entry.shape else torch.empty((), dtype=entry.torch_dtype)
        reader.read_into(full_name, local_shard(value, engine.rank))
        state.setdefault(index[id(parameter)], {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _empty_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor sharded like a parameter."""
    return torch.empty_like(parameter.detach(), dtype=dtype)


class Extra(NamedTuple):
    """The state beside the tensors; the last two are empty unless as many ranks saved as load."""

    rank_zero: dict[str, Any]  # rank 0's JSON
    own: dict[str, Any] | None  # this rank's JSON
    generators: dict[str, Tensor]  # this rank's


def _read_extra(engine: "TorchEngine", folder: Path, num_ranks_saved: int) -> Extra:
    rank_zero = json.loads((folder / _file_name("extra", num_ranks_saved, 0)).with_suffix(".json").read_text())
    if num_ranks_saved != engine.world_size:
        return Extra(rank_zero, None, {})
    path = folder / _file_name("extra", num_ranks_saved, engine.rank)
    generators = rng.read_generator_states(path)
    rng.check_generator_states(generators, engine.device)
    return Extra(rank_zero, json.loads(path.with_suffix(".json").read_text()), generators)


def _restore_extra(engine: "TorchEngine", extra: Extra) -> None:
    rank_zero = extra.rank_zero
    if engine.lr_scheduler is not None and rank_zero["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(rank_zero["schedule"])
    engine.skipped_steps = int(rank_zero["skipped_steps"])
    if extra.own is not None:
        rng.restore_generators(extra.own, extra.generators, engine.device)
    else:
        rng.derive_generators(json.dumps(rank_zero["python_rng"]), engine.rank, engine.world_size)


def _check_contents(contents: tuple[str, ...], key: str) -> None:
    unknown = [name for name in contents if name not in CONTENTS]
    if unknown:
        raise ConfigError(f"checkpoint.{key} has {unknown[0]!r}; allowed: {', '.join(CONTENTS)}")
