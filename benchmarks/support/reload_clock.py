"""Seconds of a server engine's own reload, and of reading its layers back.

Every endpoint of a benchmark's transport imports this module (`custom_backend_module`). The server writes the seconds
of each update, as JSON, to the file that VERL_BENCHMARK_RELOADS names: `reload`, the engine's own work without the
receipt (neither fingerprints nor reading back), and `read_back`, with noting what the layers should hold.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.workers.rollout.vllm import worker as vllm_worker
from verl.workers.rollout.vllm.engine import VLLMEngine
from verl.workers.rollout.vllm.weight_readback import WeightReader
from verl.workers.rollout.vllm.worker import WeightReceiver

VARIABLE = "VERL_BENCHMARK_RELOADS"
seconds = {"engine": 0.0, "fingerprints": 0.0, "read_back": 0.0}


def timed(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args)
        finally:
            seconds[kind] += time.perf_counter() - begin

    return call


def milliseconds_of_update(file: Path) -> dict[str, float]:
    """`reload` and `read_back` of the last update of the server that writes to `file`."""
    return {name: 1000 * value for name, value in json.loads(file.read_text()).items()}


async def flush_cache(engine: VLLMEngine) -> None:
    """Flush the cache, which ends an update, and write the seconds of the update."""
    begin = time.perf_counter()
    await flush(engine)
    seconds["engine"] += time.perf_counter() - begin
    reload = seconds["engine"] - seconds["fingerprints"] - seconds["read_back"]
    Path(os.environ[VARIABLE]).write_text(json.dumps({"reload": reload, "read_back": seconds["read_back"]}))
    seconds.update(dict.fromkeys(seconds, 0.0))


if VARIABLE in os.environ:
    flush = VLLMEngine.flush_cache
    VLLMEngine.flush_cache = flush_cache  # type: ignore[assignment,method-assign]
    vllm_worker.fingerprint = timed("fingerprints", vllm_worker.fingerprint)
    for name in ("record", "compare_and_reset"):
        setattr(WeightReader, name, timed("read_back", getattr(WeightReader, name)))
    for name in ("verl_begin", "verl_load", "verl_finish"):
        setattr(WeightReceiver, name, timed("engine", getattr(WeightReceiver, name)))
