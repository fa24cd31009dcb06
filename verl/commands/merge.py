"""`verl merge` and `python -m verl.model_merger`: the shards of a checkpoint as a Hugging Face folder."""

import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, PreTrainedModel

from verl.commands.parsers import merge_options
from verl.config import HFModelConfig
from verl.models import export
from verl.models.load import load_tokenizer, read_config
from verl.models.tensor_file import write_tensors
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import expand_home, model_name, publish_directory
from verl.workers.engine.manifest import MANIFEST, export_damage, read_manifest
from verl.workers.engine.shard_folders import ShardFolder, open_shard_folder

LORA_META = "lora_train_meta.json"
ADAPTER = "lora_adapter"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when the folder was written, or the comparison found no difference."""
    options = merge_options(argv)
    if options.backend != "fsdp":
        raise ConfigError(f"--backend {options.backend} is still to come; --backend fsdp reads FSDP shards")
    if options.trust_remote_code:
        raise ConfigError("--trust-remote-code is refused: code from a checkpoint is never run; leave it out")
    given = {"target_dir": None, "test_hf_dir": None, **vars(options)}
    folder, target, other = (expand_home(given[n] or "", f"--{n}") for n in ("local_dir", "target_dir", "test_hf_dir"))
    source = open_shard_folder(folder)
    warn_of_damaged_export(folder)
    model = _meta_model(folder / "huggingface", options.is_value_model, options.tie_word_embedding)
    if options.operation == "test":
        count = check_same_tensors(source, model, other)
        print(f"{folder} and {options.test_hf_dir} hold the same {count} tensors")
        return 0
    target = target if options.target_dir else Path(model_name(folder))
    written = write_merged_model(source, model, folder, target)
    print(f"wrote and verified {written} tensors in {target}")
    if (target / ADAPTER).is_dir():
        print(f"they are the model without its adapters, which are in {target / ADAPTER}; peft merges them")
    if options.hf_upload_path:
        _upload(target, options.hf_upload_path, options.private)
    return 0


def warn_of_damaged_export(folder: Path) -> None:
    """Print what is wrong with the Hugging Face and adapter folders. Files that a user has edited count as damaged."""
    manifest = read_manifest(folder) if (folder / MANIFEST).is_file() else {"files": {}}
    for damage in export_damage(folder, manifest):
        print(
            f"warning: {damage}; the weights are made from the shards, every other file is taken as it is: unless you "
            "edited it, merge another checkpoint or copy the file from one",
            file=sys.stderr,
        )


def write_merged_model(source: ShardFolder, model: PreTrainedModel, folder: Path, target: Path) -> int:
    """Write model, configuration, tokenizer and adapters to `target` atomically; returns the number of tensors."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"--target_dir {target} exists already; remove it or name another folder")
    names = saved_names_of_base_tensors(source, model)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    plan = export.plan_export(model, {name: source.meta_tensors[full] for name, full in names.items()})
    try:
        shutil.copytree(folder / "huggingface", temporary, ignore=shutil.ignore_patterns("*.safetensors*"))
        _correct_generation_config(temporary)
        _write_adapters(source, folder, temporary / ADAPTER)
        written = export.write_layers(
            plan, plan.own_layers(_read_tensors(source, names)), temporary, plan.wants_reload("auto")
        )
        if written.tensors:
            export.reload_export(plan, written.tensors, temporary, next(iter(source.meta_tensors.values())).dtype)
        publish_directory(temporary, target)
    except OSError as error:
        raise CheckpointError(f"--target_dir {target} could not be written: {error}; name another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sum(len(file.tensors) for file in plan.files)


def check_same_tensors(source: ShardFolder, model: PreTrainedModel, other: Path) -> int:
    """CheckpointError naming the first tensor that differs from those in folder `other`; returns how many are equal."""
    names = saved_names_of_base_tensors(source, model)
    plan = export.plan_export(model, {name: source.meta_tensors[full] for name, full in names.items()})
    files = {name: path for path in sorted(other.glob("*.safetensors")) for name in _names_in(path)}
    if not files:
        raise CheckpointError(f"--test_hf_dir {other} holds no *.safetensors; give a Hugging Face folder")
    wanted = {name for file in plan.files for name in file.tensors}
    if wanted != files.keys():
        first = sorted(wanted ^ files.keys())[0]
        where = "the shards" if first in wanted else str(other)
        raise CheckpointError(f"{len(wanted ^ files.keys())} tensors are on one side only, first {first}, in {where}")
    for _, layer in plan.own_layers(_read_tensors(source, names)):
        for name, ours in export.to_hub_format(model, layer).items():
            with safe_open(files[name], framework="pt") as file:
                theirs = file.get_tensor(name)
            if ours.shape != theirs.shape:
                raise CheckpointError(
                    f"{name} differs: {_describe(ours)} in the shards, {_describe(theirs)} in {files[name]}"
                )
            if not torch.equal(ours := ours.to(theirs.dtype), theirs):
                most = (ours.double() - theirs.double()).abs().max()
                raise CheckpointError(f"the values of {name} differ by up to {most:.3g} from those in {files[name]}")
    return len(wanted)


def saved_names_of_base_tensors(source: ShardFolder, model: PreTrainedModel) -> dict[str, str]:
    """Maps each tensor of the model, tied ones once, to its name in `source`; CheckpointError where they do not fit."""
    if source.meta_tensors and all(".lora_" in name for name in source.meta_tensors):
        raise CheckpointError(
            "the checkpoint holds LoRA adapters alone (checkpoint.save_lora_only=True), without the model they belong "
            f"to; peft loads its {ADAPTER} folder onto that model, and merge_and_unload() makes them one"
        )
    needed = [name for name, _ in model.named_parameters()]
    state = model.state_dict().keys()
    needed += [name for name, _ in model.named_buffers() if name in state]
    saved_names = {name.replace(".base_layer.", "."): name for name in source.meta_tensors if ".lora_" not in name}
    wrong = [f"{name} is missing" for name in needed if name not in saved_names]
    wrong += [f"{name} is not in {type(model).__name__}" for name in saved_names if name not in state]
    for name, tensor in model.state_dict().items():
        if name in saved_names and tensor.shape != source.meta_tensors[saved_names[name]].shape:
            saved = tuple(source.meta_tensors[saved_names[name]].shape)
            wrong.append(f"{name} is {saved}, config.json says {tuple(tensor.shape)}")
    if wrong:
        raise CheckpointError(
            f"the shards do not fit config.json ({type(model).__name__}): {len(wrong)} tensors, {'; '.join(wrong[:3])}"
        )
    first = {id(tensor): name for name, tensor in model.named_parameters()}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        if name in saved_names and name not in needed:
            same = first[id(tensor)]
            if not torch.equal(source.read(saved_names[name]), source.read(saved_names[same])):
                raise CheckpointError(
                    f"{name} and {same} are one tensor by config.json or --tie-word-embedding, but differ in the "
                    "shards: one would be lost; leave the option out, or set tie_word_embeddings to false"
                )
    return {name: saved_names[name] for name in needed}


def _read_tensors(source: ShardFolder, names: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    return ((name, source.read(full)) for name, full in names.items())


def _meta_model(folder: Path, is_value_model: bool, tied: bool) -> PreTrainedModel:
    """The model of a configuration, on the meta device."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}/config.json is missing; it says which model the shards are of")
    config = read_config(folder)
    if tied:
        config.tie_word_embeddings = True
    names = config.architectures or []
    is_value_model = is_value_model or any("TokenClassification" in name for name in names)
    kind: Any = AutoModelForTokenClassification if is_value_model else AutoModelForCausalLM
    if is_value_model:
        config.num_labels = 1
    elif names and hasattr(transformers, names[0]):
        kind = getattr(transformers, names[0])
    with torch.device("meta"):
        return kind.from_config(config) if hasattr(kind, "from_config") else kind._from_config(config)


def _correct_generation_config(folder: Path) -> None:
    """Rewrites generation_config.json if it holds what `transformers` would refuse when the merged model is loaded, or
    lacks the token that ends a trained answer."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return
    try:
        values = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path.name} of the checkpoint holds no settings ({error}); remove it there") from error
    has_tokenizer = any((folder / name).is_file() for name in export.TOKENIZER_FILES)
    tokenizer = load_tokenizer(HFModelConfig(path=str(folder))) if has_tokenizer else None
    fitting = export.with_end_marks(export.fitting_generation_values(values), tokenizer)
    if fitting != values:
        path.write_text(json.dumps(fitting, indent=2) + "\n")


def _write_adapters(source: ShardFolder, folder: Path, target: Path) -> None:
    """Write the LoRA adapters in peft's format: copy the folder our engine wrote, or convert the shards' tensors."""
    adapters = {name: name for name in source.meta_tensors if ".lora_" in name}
    if not adapters:
        return
    if (folder / ADAPTER).is_dir():
        shutil.copytree(folder / ADAPTER, target)
        return
    if not (folder / LORA_META).is_file():
        raise CheckpointError(f"{folder} holds LoRA adapters but no {LORA_META}, which says their rank and alpha")
    meta = json.loads((folder / LORA_META).read_text())
    target.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": meta.get("task_type") or "CAUSAL_LM",
        "r": meta["r"],
        "lora_alpha": meta["lora_alpha"],
        "target_modules": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in adapters}),
        "bias": "none",
    }
    (target / "adapter_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    tensors = {f"base_model.model.{name.replace('.default.', '.')}": source.read(name) for name in adapters}
    write_tensors(target / "adapter_model.safetensors", tensors)


def _names_in(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _upload(folder: Path, repository: str, private: bool) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HTTPError

    api = HfApi()
    try:
        api.create_repo(repo_id=repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, repo_type="model")
    except (OSError, HTTPError, HFValidationError) as error:  # offline, no answer, no permission, no such name
        raise ConfigError(
            f"--hf_upload_path {repository}: nothing was uploaded to {api.endpoint} ({str(error).splitlines()[0]}). "
            f"The model is whole in {folder}; once online and logged in (HF_TOKEN set, HF_HUB_OFFLINE not), "
            f"`hf upload {repository} {folder}` sends it"
        ) from error
    print(f"uploaded {folder} to {repository}")
