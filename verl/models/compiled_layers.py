"""Decoder layers through torch.compile: one graph for all layers of a kind, whatever the lengths of a pack."""

import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from verl.config import HFModelConfig
from verl.data.metrics import Metrics
from verl.models.decoder.lean_weights import LEAN_FAMILIES, why_not_lean
from verl.plugin.platform import get_platform

logger = logging.getLogger(__name__)

FEW_GRAPHS = 8  # training and log-probs, each with and without a window, adapters, checkpointing
MOST_GRAPHS = 64  # of all models in this process; torch's own limit of 8 would end in eager layers without a word


class LayerGraphs:
    """The backend of a model's layers: compiles each graph and counts it. One that does not compile runs eagerly."""

    def __init__(self, backend: str):
        self.backend, self.count, self.counted = backend, 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        try:
            compiled = torch._dynamo.lookup_backend(self.backend)(graph, inputs)
        except torch._dynamo.exc.RestartAnalysis:  # the tracer starts again
            raise
        except Exception as error:  # whatever a compiler raises, the layer is right without it
            reason = " ".join(str(error).split())[:300]
            logger.warning("a decoder layer does not compile and runs eagerly: %s: %s", type(error).__name__, reason)
            compiled = graph.forward
        self.count += 1
        if self.count == FEW_GRAPHS + 1:
            advice = "each takes seconds; TORCH_LOGS=recompiles tells why, model.compile_layers=off runs them eagerly"
            logger.warning("the decoder layers needed a graph number %d: %s", self.count, advice)
        return compiled

    def add_metrics(self, metrics: Metrics) -> None:
        """Add the graphs so far, and those that are new since the last call."""
        metrics.max("layer_graphs", self.count)
        metrics.max("new_layer_graphs", self.count - self.counted)
        self.counted = self.count


def compile_layers(model: nn.Module, config: HFModelConfig, num_ranks: int = 1) -> LayerGraphs | None:
    """Compile the decoder layers as `model.compile_layers` says; None if they run eagerly."""
    backend = layer_backend(model, config, num_ranks)
    if backend == "off":
        return None
    graphs = LayerGraphs(backend)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.compile(backend=graphs, dynamic=True)
    return graphs


def layer_backend(model: nn.Module, config: HFModelConfig, num_ranks: int) -> str:
    """The backend of torch.compile, or off. With auto: Inductor for unsharded plain decoders on GPUs."""
    if config.compile_layers != "auto":
        return config.compile_layers
    fits = model.config.model_type in LEAN_FAMILIES and config.use_remove_padding and num_ranks == 1
    if type(model).__name__.endswith("ForCausalLM"):  # the generic decoder would run these layers with its cache
        fits = fits and not why_not_lean(model)
    if not get_platform().compiles_triton() or not fits or config.use_liger or config.enable_activation_offload:
        return "off"
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang")):
        logger.warning("decoder layers are not compiled: there is no C compiler; install gcc, or set CC")
        return "off"
    return "inductor"
