"""Parameters and optimiser state in CPU memory while an engine is idle."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.workers.engine.torch_engine import TorchEngine


@contextmanager
def on_device(engine: "TorchEngine", training: bool) -> Iterator["TorchEngine"]:
    """What a pass needs is on the device inside the block; what the configuration offloads is back on the CPU after."""
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
    """Move an optimiser's state; step counts stay where they are."""
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "step":
                state[name] = value.to(device)
