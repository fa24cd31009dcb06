"""A module for `model.external_lib`: rank 1 sleeps in its second optimiser step, in which the others wait for it."""

import os
import time
from typing import Any

from verl.workers.engine.torch_engine import TorchEngine

optim_step = TorchEngine.optim_step
steps: list[Any] = []


def step_or_sleep(engine: TorchEngine) -> Any:
    steps.append(engine)
    if len(steps) == 2 and os.environ.get("RANK") == "1":
        time.sleep(600)
    return optim_step(engine)


TorchEngine.optim_step = step_or_sleep  # type: ignore[method-assign]
