"""A rollout server with data-parallel ranks of the real vLLM, of which one can be asked to load a tensor wrongly.

The file in `tests.vllm_server.FAULT_FILE` holds "RANK TENSOR".
"""

from tests.vllm_server import scale_as_asked
from verl.workers.rollout import engine_server, vllm_engine
from verl.workers.rollout.vllm_worker import WeightReceiver


class FaultyRank(WeightReceiver):
    """Loads the tensor of the file times 1.001 on its data-parallel rank."""

    def verl_begin(self) -> None:
        super().verl_begin()
        if not hasattr(self, "_scales_as_asked"):
            self._scales_as_asked = True
            scale_as_asked(self, self.vllm_config.parallel_config.data_parallel_index)


if __name__ == "__main__":
    vllm_engine.WORKER_EXTENSION = f"tests.vllm_data_parallel_server.{FaultyRank.__name__}"
    engine_server.main()
