"""Writes all of a checkpoint but its tensors once before the first step, to find what cannot be saved."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from verl.models import export, lora
from verl.utils.errors import ConfigError
from verl.workers.engine.checkpoint_tensors import persistent_buffers
from verl.workers.engine.manifest import HUGGINGFACE

if TYPE_CHECKING:
    from verl.workers.engine.torch_engine import TorchEngine

ADAPTERS = "lora_adapter"


def files_beside_tensors(engine: "TorchEngine") -> dict[str, bytes]:
    """The configuration, tokenizer and adapter settings of every checkpoint, by path in its folder.

    ConfigError where the libraries cannot write one, or cannot bring the weights into the family's format.
    """
    model, settings = engine.model, engine.model_config
    try:
        with tempfile.TemporaryDirectory(prefix="verl-save-") as name:
            folder = Path(name)
            export.export_config_and_tokenizer(model, settings, folder / HUGGINGFACE)
            if lora.has_adapters(model):
                (folder / ADAPTERS).mkdir()
                lora.write_adapter_config(model, folder / ADAPTERS)
            files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    except OSError as error:
        raise ConfigError(
            f"the files of a checkpoint could not be tried in {tempfile.gettempdir()}: {error}; let TMPDIR name a "
            "folder with room"
        ) from error
    if "hf_model" in engine.checkpoint_config.save_contents:
        plan_of_export(engine)
    return files


def plan_of_export(engine: "TorchEngine") -> tuple[export.ExportPlan, dict[str, Tensor]]:
    """Which rank writes which file of the Hugging Face folder, and tensors with the shapes and types to write."""
    plain = {name: t for full, t in engine.weights.named_parameters if (name := lora.base_name(full))}
    shapes = {**plain, **persistent_buffers(engine)}
    return export.plan_export(engine.model, shapes, engine.rank, engine.world_size), shapes
