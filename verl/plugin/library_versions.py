"""Differences between the releases of torch, transformers and vLLM that pyproject.toml allows.

Each entry says from which release on it is not needed: delete it when that is the oldest that is allowed.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl.plugin.installed import version_of
from verl.plugin.versions import at_least
from verl.utils.errors import ConfigError


def give_weights_one_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating-point parameters of `model` to `dtype`, which it was made with.

    From transformers 5.24 on, routers of DeepSeek's and GLM's families have float32 weights whatever dtype is asked
    for; FSDP shards one dtype, and a router computes in float32 either way. To stay: transformers says no end of it.
    """
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def recompute_activations(model: Any, **arguments: Any) -> None:
    """Gradient checkpointing. transformers 5.24 renames it; the old name goes with transformers 5.24 as the oldest."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(arguments)


def cache_argument(forward: Callable[..., Any]) -> str:
    """The cache argument of a model's forward; "past_key_values" goes once transformers 5.24 is the oldest."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def forget_forward_pass(fsdp2_model: Any) -> None:
    """Let FSDP2 go on after a pass that raised; the refusal goes with torch 2.13 as the oldest."""
    if not hasattr(fsdp2_model, "reset_iter_state"):
        raise ConfigError(
            f"a micro-batch ran out of memory, and FSDP2 of torch {torch.__version__} cannot go on after that; use "
            f"torch 2.13 or later, or smaller micro-batches"
        )
    fsdp2_model.reset_iter_state()


def multiplied(own: Tensor, factor: Tensor) -> Tensor:
    """`own` * `factor`, in the memory of `own` unless a compiler traces it; `mul_` alone with torch 2.12 as the oldest.

    A compiled autograd function of torch 2.11 that returns what it changed in place gets zeros as its gradient.
    """
    return own * factor if torch.compiler.is_compiling() else own.mul_(factor)


def falcon_h1_padded_because() -> str:
    """Why Falcon-H1 runs padded, or ""; goes with transformers 5.17 as the oldest."""
    hands_on = at_least(version_of("transformers"), "5.17")
    return "" if hands_on else "before transformers 5.17 its model does not hand on where sequences begin"


def let_fp8_be_read(config: Any) -> None:
    """Give the parallel plan of experts that reading fp8 weights needs; goes with transformers 5.17 as the oldest.

    transformers 5.16 looks it up for every model, also one without experts, and fails where there is none.
    """
    if not at_least(version_of("transformers"), "5.17"):
        from transformers.integrations.finegrained_fp8 import FP8Experts

        plans: Any = FP8Experts._impl_tp_layer_overrides
        plans.setdefault(getattr(config, "_experts_implementation", None), {})


class CPUExperts(NamedTuple):
    """vLLM's kernel for joined experts on a CPU, how it packs a matrix, whether a layer is packed in another way."""

    kernel: type
    pack: Callable[[Tensor, str], Tensor]
    packs_otherwise: Callable[[nn.Module], bool]


def vllm_cpu_experts() -> CPUExperts | None:
    """None, with which the probe alone checks joined experts on a CPU, goes with vLLM 0.28 as the oldest."""
    try:
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe

        return CPUExperts(
            cpu_moe.CPUUnquantizedExperts, cpu_moe.cpu_prepack_moe_weight, cpu_moe.is_zentorch_moe_supported
        )
    except (ImportError, AttributeError):
        return None
