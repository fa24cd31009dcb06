"""The adapter to liger-kernel: puts its RMSNorm, gated MLP and rotary embedding into an existing model."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError

ENABLED_KERNELS = ("rope", "rms_norm", "swiglu", "geglu")  # each family's function takes some of them
DISABLED_KERNELS = ("cross_entropy", "fused_linear_cross_entropy")  # our head computes these without storing logits


def use_liger(model: nn.Module) -> None:
    """Replaces norm, MLP and rotary embedding of `model` by Liger's Triton kernels; the head stays ours.

    Liger replaces the family's rotary function in the whole process.
    """
    platform = get_platform()
    if not platform.compiles_triton():
        raise ConfigError(
            "model.use_liger=True needs a GPU: the kernels are written in Triton, which has no compiler for "
            f"{platform.device_name!r}; set model.use_liger=False"
        )
    apply = liger_function(model.config.model_type)
    apply(model=model, **liger_arguments(apply))


def liger_function(model_type: str) -> Callable[..., None]:
    """Liger's function for a model family; ConfigError with the families it supports if there is none."""
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise ConfigError(
            f"model.use_liger=True needs the package liger-kernel ({error}); pip install liger-kernel, "
            "or set model.use_liger=False"
        ) from error
    families: dict[str, Any] = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if model_type not in families:
        raise ConfigError(
            f"model.use_liger=True: liger-kernel has no kernels for model family {model_type!r}; it has "
            f"{', '.join(sorted(families))}. Set model.use_liger=False"
        )
    return families[model_type]


def liger_arguments(apply: Callable[..., None]) -> dict[str, bool]:
    """Arguments of `apply`: norm, MLP and rotary embedding on if Liger's default is on, every cross-entropy off."""
    parameters = inspect.signature(apply).parameters
    enabled = {name: True for name in ENABLED_KERNELS if name in parameters and parameters[name].default is True}
    return enabled | {name: False for name in DISABLED_KERNELS if name in parameters}
