"""A rollout server with data-parallel ranks of the real vLLM, of which one can be asked to load a tensor wrongly.

The file in `tests.vllm_server.FAULT_FILE` holds "RANK TENSOR", or "slow": then the ranks make tokens faster than the
server reads them.
"""

import os
import time
from pathlib import Path
from typing import Any

from tests.vllm_server import FAULT_FILE, scale_as_asked
from verl.workers.rollout.remote import server as engine_server
from verl.workers.rollout.vllm import engine as vllm_engine
from verl.workers.rollout.vllm.worker import WeightReceiver


class FaultyRank(WeightReceiver):
    """Loads the tensor of the file times 1.001 on its data-parallel rank."""

    def verl_begin(self) -> None:
        super().verl_begin()
        if not hasattr(self, "_scales_as_asked"):
            self._scales_as_asked = True
            scale_as_asked(self, self.vllm_config.parallel_config.data_parallel_index)


def read_slowly_as_asked() -> None:
    from vllm.v1.serial_utils import MsgpackDecoder

    decode = MsgpackDecoder.decode

    def decode_slowly(self: Any, buffers: Any) -> Any:
        if Path(os.environ[FAULT_FILE]).read_text() == "slow":
            time.sleep(0.01)
        return decode(self, buffers)

    MsgpackDecoder.decode = decode_slowly


if __name__ == "__main__":
    read_slowly_as_asked()
    vllm_engine.WORKER_EXTENSION = f"tests.vllm_data_parallel_server.{FaultyRank.__name__}"
    engine_server.main()
