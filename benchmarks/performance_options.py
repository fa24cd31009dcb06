"""Time and memory of each performance option on this machine: one update of a small Qwen3 per option.

    python benchmarks/performance_options.py [--json PATH]

Every case runs in a separate process, on the same random model and batch in float32: seconds of forward and backward
(median after one warm-up), and the peak memory above that of the process before the first update.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from head import peak_bytes, reset_peak
from support.record import save
from transformers import Qwen3Config

from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.workers.engine.fsdp_engine import FSDPEngineWithLMHead

PLAIN: dict[str, Any] = {"model": {"enable_gradient_checkpointing": False}, "engine": {"head_mode": "eager"}}
CASES: dict[str, dict[str, Any]] = {
    "plain: eager head, nothing recomputed": PLAIN,
    "default head (chunked, one pass)": {"model": PLAIN["model"]},
    "use_fused_kernels": {"model": {**PLAIN["model"], "use_fused_kernels": True}},
    "entropy_from_logits_with_chunking": {**PLAIN, "engine": {"entropy_from_logits_with_chunking": True}},
    "entropy_checkpointing": {**PLAIN, "engine": {"entropy_checkpointing": True}},
    "enable_gradient_checkpointing": {"model": {}},
    "enable_activation_offload": {"model": {**PLAIN["model"], "enable_activation_offload": True}},
    "use_remove_padding=False": {"model": {**PLAIN["model"], "use_remove_padding": False}},
}
SHAPE = {
    "vocab_size": 32000, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
LENGTHS = (40, 60, 80, 100, 120, 150, 200, 274)


class Likelihood:
    """-log p and an entropy bonus times the loss weights: the outputs of the head that a policy update needs."""

    outputs, columns, optional_columns, per_token = ("logprobs", "entropy"), ("loss_weights",), (), True

    def __call__(self, outputs: dict, columns: dict, cu_seqlens: object = None) -> tuple[torch.Tensor, dict]:
        return -(outputs["logprobs"] + 0.01 * outputs["entropy"]) * columns["loss_weights"], {}


def measure(name: str, folder: str, repeats: int) -> dict[str, float]:
    case = CASES[name]
    model = HFModelConfig(path=folder, override_config={"init_random": True}, **case["model"])
    engine_config = FSDPEngineConfig(**case.get("engine", {}))
    engine = FSDPEngineWithLMHead(model, engine_config, FSDPOptimizerConfig(lr=1e-6))
    engine.initialize()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(SHAPE["vocab_size"], (length,), generator=generator).tolist() for length in LENGTHS]
    batch = Batch.pack([Trajectory.from_completion(row[:4], row[4:], [0.0] * len(row[4:]), group_id=0) for row in rows])
    batch = batch.with_columns(loss_weights=batch["loss_mask"] / sum(LENGTHS))

    def update() -> float:
        start = time.perf_counter()
        engine.forward_backward(batch, Likelihood(), MicroBatching(max_tokens=sum(LENGTHS)))
        return time.perf_counter() - start

    reset_peak()
    before = peak_bytes()
    update()
    memory = (peak_bytes() - before) / 1e6
    return {"seconds": round(statistics.median(update() for _ in range(repeats)), 3), "memory_mb": round(memory, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        torch.set_num_threads(1)
        print(json.dumps(measure(*args.measure, args.repeats)))
        return
    figures = {}
    print(f"| case | seconds | MB |\n|---|--:|--:|  ({sum(LENGTHS)} tokens, {SHAPE['num_hidden_layers']} layers)")
    with tempfile.TemporaryDirectory() as folder:
        Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        for name in CASES:
            command = [sys.executable, __file__, "--repeats", str(args.repeats), "--measure", name, folder]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            result = figures[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"| {name} | {result['seconds']} | {result['memory_mb']} |", flush=True)
    if args.json is not None:
        torch.set_num_threads(1)
        save(args.json, {"performance_options": figures})


if __name__ == "__main__":
    main()
