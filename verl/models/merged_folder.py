"""A base model and its adapters as one Hugging Face folder, for engines that read a folder."""

import atexit
import shutil
import tempfile
from itertools import chain
from pathlib import Path

import torch

from verl.config import HFModelConfig
from verl.models import export
from verl.models.load import build_config, load_causal_lm, load_config
from verl.models.lora import adapter_scales, add_adapters, merge_adapters
from verl.utils.errors import ConfigError


def merged_folder(settings: HFModelConfig) -> Path:
    """A temporary folder with the model of `settings.path` and the adapters of `lora_adapter_path` merged into it, in
    the type of its weights; removed when the program ends. ConfigError where it cannot be written."""
    folder = Path(tempfile.mkdtemp(prefix="verl-merged-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        write_merged(settings, folder)
    except OSError as error:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_adapter_path={settings.lora_adapter_path}: the merged model could not be "
            f"written to {folder}: {error}; let TMPDIR name a folder with more room"
        ) from error
    return folder


def write_merged(settings: HFModelConfig, folder: Path) -> None:
    """Write the merged model, its configuration and its tokenizer."""
    path = settings.path or ""
    dtype = load_config(path).dtype or torch.float32
    changed = [build_config(settings)[0] for _ in range(2)]
    base, model = (
        load_causal_lm(path, dtype, c, structure_only=m) for c, m in zip(changed, (True, False), strict=True)
    )
    add_adapters(model, settings, seed=0)
    parameters = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    saved = model.state_dict()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    weights = list(chain(merge_adapters(parameters, adapter_scales(model)), buffers))
    plan = export.plan_export(base, dict(weights))
    export.export_config_and_tokenizer(base, settings, folder)
    export.write_layers(plan, plan.own_layers(weights), folder)
