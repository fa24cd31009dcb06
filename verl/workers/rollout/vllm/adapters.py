"""Loads published LoRA adapters in vLLM's own workers, from memory, and reads them back from its layers.

vLLM joins projections (qkv_proj, gate_up_proj) and keeps the adapters of each in one slot of stacked matrices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from vllm.lora.layers import BaseLayerWithLoRA, LogitsProcessorWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from verl.models.fingerprint import fingerprint
from verl.utils.errors import ConfigError
from verl.workers.rollout.base import ReadBack
from verl.workers.rollout.vllm.weight_readback import places

ADAPTER_ID = 1  # of every version: one takes the place of the last, for running requests too, as whole weights do


@contextmanager
def plain_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Inside the block `model` has its own layers, without those that vLLM puts around them for adapters.

    The head stays plain: no adapter is for it, and what vLLM puts around it takes no log-probs of a prompt.
    """
    wrapped = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent._modules.items()
        if isinstance(layer, BaseLayerWithLoRA)
    ]
    for parent, name, layer in wrapped:
        parent._modules[name] = layer.base_layer
    try:
        yield model
    finally:
        for parent, name, layer in wrapped:
            if not isinstance(layer, LogitsProcessorWithLoRA):
                parent._modules[name] = layer


def request_of(version: int) -> LoRARequest:
    """Names `version`, which keeps prefix caches apart; the path is never read, as the adapters are in memory."""
    return LoRARequest(f"version-{version}", ADAPTER_ID, f"/in-memory/version-{version}")


def load_adapters(manager: Any, tensors: dict[str, Tensor]) -> ReadBack:
    """Put `tensors` (names as in a folder of adapters, B times its scale) in the place of the last version.

    `manager`: vLLM's manager of adapters. ConfigError where vLLM has no adapters for a layer.
    """
    rank = max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    settings = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])  # a scale of 1
    names, dtype = mapper and mapper.get_rename_mapper(), manager.lora_config.lora_dtype
    adapters = LoRAModel.from_lora_tensors(
        ADAPTER_ID, tensors, settings, device="cpu", dtype=dtype, weights_mapper=names
    )
    layers: dict[str, tuple[str, int | None]] = {
        name: (name, None) for name, m in manager.modules.items() if not isinstance(m, LogitsProcessorWithLoRA)
    }
    for path, parts in manager.packed_modules.items():
        layers |= {part: (path, number) for number, part in enumerate(parts)}
    if unknown := sorted(adapters.loras.keys() - layers.keys()):
        raise ConfigError(
            f"vLLM's {type(manager.model).__name__} takes no adapters for {len(unknown)} layers that have them, first "
            f"{unknown[0]}; set actor_rollout_ref.model.lora.merge=True, or name them in model.exclude_modules"
        )
    sent = {name: (*layers[name], lora.lora_a, lora.lora_b) for name, lora in adapters.loras.items()}
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapters)
    manager.activate_adapter(ADAPTER_ID)
    return _compare(manager, sent)


def _compare(manager: Any, sent: dict[str, tuple[str, int | None, Tensor, Tensor]]) -> ReadBack:
    """The adapters in the layers, by name: layer, number of the joined projection, A and B."""
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    wrong, unread = [], []
    for name, (path, number, a, b) in sent.items():
        layer: Any = manager.modules[path]
        if manager.lora_config.fully_sharded_loras and layer.tp_size > 1:
            unread += [f"{name}.lora_A", f"{name}.lora_B"]
            continue
        [place] = places(layer.base_layer, "weight", number)
        parts = {"lora_A": a[(slice(None), *place.sent[1:])], "lora_B": b[place.sent[:1]]}
        for part, tensor in parts.items():
            stacked = layer.lora_a_stacked if part == "lora_A" else layer.lora_b_stacked
            held = stacked[number or 0][slot, 0, : tensor.shape[0], : tensor.shape[1]]
            arrived, found = fingerprint(tensor.contiguous()), fingerprint(held.contiguous())
            if arrived != found:
                wrong.append((f"{name}.{part}", path, arrived, found))
    return ReadBack(2 * len(sent) - len(unread), tuple(wrong), (), tuple(unread), 2 * len(sent))
