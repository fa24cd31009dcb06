"""Offloading of parameters and optimiser state to CPU memory while an engine is idle."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.workers.engine.torch_engine import TorchEngine


@contextmanager
def on_device(engine: "TorchEngine", training: bool) -> Iterator["TorchEngine"]:
    """A context with a pass's tensors on the device and the model in training or evaluation mode; tensors configured
    for offloading return to the CPU on exit."""
    config = engine.engine_config
    model, optimizer = config.param_offload, training and config.optimizer_offload
    if model or optimizer:
        engine.to("device", model, optimizer)
    try:
        engine.model.train(training)
        yield engine
    finally:
        if model or optimizer:
            engine.to("cpu", model, optimizer)


def move_optimizer_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move an optimiser's state; step counts are not moved."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device)
