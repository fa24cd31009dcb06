"""`python -m sglang.launch_server` without SGLang: its command line, its protocol, and the model's weights.

It answers each request with the number of its replica.
"""

import argparse
import threading
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.rollout_adapters import CONFIG, letters_tokenizer, native_behind
from tests.standins import FakeSGLangServer
from verl.config.rollout import RolloutConfig
from verl.workers.rollout.base import Completion, SamplingParams


class NumberedServer(FakeSGLangServer):
    """Its seed tells which replica it is."""

    replica = 0

    async def answer(self, name: str, ids: list[int], sampling: SamplingParams) -> Any:
        return Completion([self.replica], [0.0], "length", (0, 0))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--random-seed", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    given, _ = parser.parse_known_args()
    NumberedServer.replica = given.random_seed - RolloutConfig().seed
    model = AutoModelForCausalLM.from_pretrained(given.model_path, dtype=torch.float32)
    NumberedServer(native_behind(model.eval(), CONFIG), letters_tokenizer(), given.port)
    threading.Event().wait()
