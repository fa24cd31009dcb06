"""A rollout server with the real vLLM that can be asked to load one tensor wrongly after it arrived.

The file in `FAULT_FILE` holds "REPLICA TENSOR"; the server of this replica scales the tensor by 1.001 from then on.
"""

import os
from pathlib import Path
from typing import Any

from verl.workers.rollout.remote import server as engine_server

FAULT_FILE = "VERL_TEST_FAULT_FILE"
build_vllm_engine = engine_server.build_vllm_engine


def build(config: Any, model_path: str, eos_token_ids: list[int], replica: int) -> Any:
    engine: Any = build_vllm_engine(config, model_path, eos_token_ids, replica)
    engine.llm.collective_rpc(scale_as_asked, args=(replica,))
    return engine


def scale_as_asked(worker: Any, replica: int) -> None:
    """Make vLLM's model load the tensor of the file times 1.001."""
    model = worker.model_runner.get_model()
    load = model.load_weights

    def load_wrongly(weights: Any) -> Any:
        whose, _, target = Path(os.environ[FAULT_FILE]).read_text().partition(" ")
        weights = [(n, t * 1.001 if whose == str(replica) and n == target else t) for n, t in weights]
        return load(iter(weights))

    model.load_weights = load_wrongly


if __name__ == "__main__":
    engine_server.build_vllm_engine = build
    engine_server.main()
