"""A rollout server whose engine is a transformers module: the real process, socket and transports without an engine.

It answers each request with the number of its replica, and sleeping until an update it loses its weights.
Tensors of certain names make it misbehave: "fail 1" raises in replica 1, "stall 1" makes it stop, "die 1" ends it.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.contract.test_weight_sync import ModuleEngine
from verl.models.fingerprint import fingerprint
from verl.workers.rollout.base import Completion, GenerationRequest
from verl.workers.rollout.remote import server as engine_server


class ReplicaModuleEngine(ModuleEngine):
    """`ModuleEngine` that knows which replica it is."""

    def __init__(self, replica: int, *args: Any):
        super().__init__(*args)
        self.replica = replica

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[dict[str, str]]:
        for name, _ in bucket:
            match name.split():
                case ["fail", number] if int(number) == self.replica:
                    raise RuntimeError("no room for a tensor")
                case ["stall", number] if int(number) == self.replica:
                    time.sleep(5)
                case ["die", number] if int(number) == self.replica:
                    os.kill(os.getpid(), signal.SIGKILL)
        [arrived] = await super().load_bucket([named for named in bucket if named[0] in self.params])
        return [arrived | {name: fingerprint(tensor) for name, tensor in bucket if name not in arrived}]

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        assert all(bool(parameter.isfinite().all()) for parameter in self.params.values()), "no weights"
        return [Completion([self.replica], [0.0], "length", (self.held, self.held))] * request.sampling.n

    async def sleep_until_update(self) -> None:
        for parameter in self.params.values():
            parameter.data.fill_(float("nan"))


def build(config: Any, model_path: str, eos_token_ids: list[int], replica: int) -> ReplicaModuleEngine:
    import torch

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager")
    return ReplicaModuleEngine(replica, model.eval(), getattr(torch, config.dtype))


def python_wrapper(folder: Path, module: str = "tests.rollout_server", first: str = "shift 2") -> str:
    """A program to give as `rollout.server.python`: it runs `module` whatever module it is asked to run.

    The shell's command `first` drops the first two arguments, and may do more.
    """
    script = folder / "python"
    script.write_text(f'#!/bin/sh\n{first}\nexec {sys.executable} -m {module} "$@"\n')
    script.chmod(0o700)
    return str(script)


if __name__ == "__main__":
    engine_server.build_vllm_engine = build
    engine_server.main()
