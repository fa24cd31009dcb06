"""This rank's shards of the tensors that an engine saves, by their names in a checkpoint."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.models import lora
from verl.workers.engine.tensor_shards import LocalShard, local_shard

if TYPE_CHECKING:
    from verl.workers.engine.torch_engine import TorchEngine


def model_tensors(engine: "TorchEngine") -> dict[str, LocalShard]:
    """This rank's shards of parameters (tied ones once) and persistent buffers; adapters alone if save_lora_only."""
    adapters_only = engine.checkpoint_config.save_lora_only and lora.has_adapters(engine.model)
    saved = [
        (name, parameter)
        for name, parameter in engine.weights.named_parameters
        if parameter.requires_grad or not adapters_only
    ]
    buffers = {} if adapters_only else persistent_buffers(engine)
    return {name: local_shard(tensor, engine.rank) for name, tensor in (*saved, *buffers.items())}


def persistent_buffers(engine: "TorchEngine") -> dict[str, Tensor]:
    """The model's persistent buffers; they are not sharded."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in engine.model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def optimizer_tensors(engine: "TorchEngine") -> dict[str, LocalShard]:
    """This rank's shards of the optimiser state, by "<parameter>|<state>"."""
    assert engine.optimizer is not None
    out: dict[str, LocalShard] = {}
    for name, parameter in engine.weights.named_parameters:
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            out[f"{name}|{key}"] = local_shard(tensor, engine.rank)
    return out
