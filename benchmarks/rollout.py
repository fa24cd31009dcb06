"""Native rollout against transformers' generate(): the same model, prompts and process, in turns.

    python benchmarks/rollout.py [--json PATH] [--threads 2] [--repeats 5]

The model is a random Qwen3 of about one million parameters (hidden 128, MLP 512, 4 layers, 4 heads, 2 key-value heads,
vocabulary 128, tied). Equal lengths: 32 prompt + 64 new tokens, no EOS. Natural lengths: a random EOS ends a
completion, at most 512 new tokens; only real tokens are counted, for both.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.record import save
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from verl.config.rollout import RolloutConfig
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.engine_stats import metrics_between
from verl.workers.rollout.native.engine import NativeEngine

PAD, EOS, PROMPT = 95, 96, 32


@dataclass(frozen=True)
class Case:
    batch: int
    new_tokens: int
    natural: bool

    @property
    def name(self) -> str:
        return f"{self.batch} x ({PROMPT} + {'natural, ' if self.natural else ''}{self.new_tokens})"


CASES = (Case(64, 64, False), Case(256, 64, False), Case(64, 512, True), Case(256, 512, True))


def million_parameter_model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=EOS, pad_token_id=PAD, bos_token_id=97,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def time_generate(model: PreTrainedModel, ids: torch.Tensor, case: Case) -> tuple[float, int]:
    """(seconds, real new tokens) of transformers' generate()."""
    settings = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "max_new_tokens": case.new_tokens,
        "pad_token_id": PAD,
    }
    if not case.natural:
        settings["min_new_tokens"] = case.new_tokens
    generate: Any = model.generate  # typed as a tensor or a module
    started = time.perf_counter()
    with torch.no_grad():
        out = generate(ids, attention_mask=torch.ones_like(ids), **settings)[:, PROMPT:]
    seconds = time.perf_counter() - started
    ended = (out == EOS).int().cumsum(-1)
    return seconds, int((ended == 0).sum() + (ended[:, -1] > 0).sum())


def time_native(engine: NativeEngine, ids: torch.Tensor, case: Case, seed: int) -> tuple[float, int]:
    """(seconds, new tokens) of the native engine's core."""
    params = SamplingParams(max_tokens=case.new_tokens, ignore_eos=not case.natural, seed=seed)
    requests = [GenerationRequest(i, prompt, params) for i, prompt in enumerate(ids.tolist())]
    started = time.perf_counter()
    completions = engine.core.run(requests, engine.eos_token_ids)
    return time.perf_counter() - started, sum(len(c.token_ids) for group in completions for c in group)


def measure(model: PreTrainedModel, case: Case, dtype: str, repeats: int) -> dict[str, float | str]:
    """Medians of both, interleaved, after one warm-up each."""
    config = RolloutConfig(dtype=dtype, prompt_length=PROMPT, response_length=case.new_tokens, max_num_seqs=case.batch)
    engine = NativeEngine(config, model)
    peer, ours = [], []
    for turn in range(repeats + 1):
        ids = torch.randint(0, PAD, (case.batch, PROMPT), generator=torch.Generator().manual_seed(turn))
        seconds, tokens = time_generate(model, ids, case)
        peer.append(tokens / seconds)
        if turn == 1:
            before = asyncio.run(engine.stats())
        seconds, tokens = time_native(engine, ids, case, seed=turn)
        ours.append(tokens / seconds)
    stats = metrics_between(before, asyncio.run(engine.stats()))
    total = stats["model_s"] + stats["sampling_s"] + stats["scheduling_s"]
    return {
        "case": case.name,
        "dtype": dtype,
        "generate_tokens_per_s": statistics.median(peer[1:]),
        "native_tokens_per_s": statistics.median(ours[1:]),
        "ratio": statistics.median(o / p for o, p in zip(ours[1:], peer[1:], strict=True)),
        "model_share": stats["model_s"] / total,
        "sampling_share": stats["sampling_s"] / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="", help="run the cases whose name starts with this")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = million_parameter_model()
    rows = []
    print(f"{'case':<28}{'generate()':>12}{'native':>12}{'ratio':>8}   model  sampling (share of native time)")
    for case in CASES:
        if not case.name.startswith(args.only):
            continue
        row = measure(model, case, args.dtype, args.repeats)
        rows.append(row)
        print(
            f"{row['case']:<28}{row['generate_tokens_per_s']:>12.0f}{row['native_tokens_per_s']:>12.0f}"
            f"{row['ratio']:>7.2f}x{row['model_share']:>8.0%}{row['sampling_share']:>10.0%}",
            flush=True,
        )
    if args.json:
        save(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
