"""One training step on GRPO groups with the prompt computed once, against the same step without sharing.

    python benchmarks/prefix_sharing.py [--json PATH] [--threads 2] [--repeats 5] [--models 1M]
    python benchmarks/prefix_sharing.py --models 0.6B --dtype bf16 --prompt 8192 --response 256 --group 32   # a GPU

A step is forward, backward and optimiser step of the actor on one group; both variants run in turns in one process. The
bound is the ratio of their FLOPs: matrices, causal attention and the head, times three for forward and backward.
Prints (speed-up measured) / (speed-up counted).
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from support.qwen3_shapes import SHAPES, model_config
from support.record import save
from transformers import AutoModelForCausalLM, Qwen3Config

from verl.algorithms.aggregation import loss_weights
from verl.algorithms.losses import make_actor_loss
from verl.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.data.batch import Batch
from verl.data.micro_batches import MicroBatching
from verl.data.trajectory import Trajectory
from verl.plugin.platform import get_platform
from verl.workers.engine.base import EngineRegistry


def build_engine(name: str, dtype: str, longest: int, checkpointing: bool, **engine_keys: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model_config(name, longest).save_pretrained(folder)
        with torch.random.fork_rng(devices=[]):
            AutoModelForCausalLM.from_config(model_config(name, longest)).save_pretrained(folder)
        engine = EngineRegistry.new(
            "language_model",
            "fsdp2",
            HFModelConfig(path=folder, enable_gradient_checkpointing=checkpointing),
            FSDPEngineConfig(model_dtype="fp32", dtype=dtype, **engine_keys),
            FSDPOptimizerConfig(lr=1e-6),
        )
        engine.initialize()
    return engine


def one_group(vocabulary: int, prompt: int, response: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(3, vocabulary, (count,), generator=generator).tolist()

    common = ids(prompt)
    rows = [Trajectory.from_completion(common, ids(response), [-4.0] * response, group_id=0) for _ in range(size)]
    batch = Batch.pack(rows)
    old = torch.full((batch.num_tokens,), -4.0) * batch["loss_mask"]
    batch = batch.with_columns(old_logprobs=old, advantages=torch.randn(batch.num_tokens, generator=generator))
    return batch.with_columns(loss_weights=loss_weights(batch, "token-mean"))


def counted_flops(config: Qwen3Config, prompt: int, response: int, size: int, shared: bool) -> float:
    """FLOPs of one forward and backward."""
    kv_heads: Any
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    layer = (
        config.hidden_size * (2 * heads + 2 * kv_heads) * head_dim + 3 * config.hidden_size * config.intermediate_size
    )
    copies = 1 if shared else size
    tokens = copies * prompt + size * response
    pairs = copies * prompt**2 / 2 + size * response * (prompt + response / 2)  # of a query and a visible key
    head = 2 * size * response * config.hidden_size * config.vocab_size
    return 3 * (config.num_hidden_layers * (2 * tokens * layer + 4 * heads * head_dim * pairs) + head)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of interleaved steps after one warm-up of each."""
    shape = (args.prompt, args.response, args.group)
    config, engine = model_config(name, args.prompt + args.response), None
    engine = build_engine(name, args.dtype, args.prompt + args.response, args.checkpointing)
    batch, loss = one_group(config.vocab_size, *shape), make_actor_loss(ActorConfig())
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(args.repeats + 1):
        for shared, samples in seconds.items():
            get_platform().synchronize()
            start = time.perf_counter()
            micro = MicroBatching(max_tokens=args.max_tokens, share_prefixes=shared)
            with engine.train_mode():
                engine.forward_backward(batch, loss, micro)
                engine.optim_step()
            get_platform().synchronize()
            samples.append(time.perf_counter() - start)
    times = {shared: statistics.median(samples[1:]) for shared, samples in seconds.items()}
    counted = counted_flops(config, *shape, shared=False) / counted_flops(config, *shape, shared=True)
    speed_up = times[False] / times[True]
    return {
        "model": name,
        "prompt, response, group": shape,
        "unshared_s": times[False],
        "shared_s": times[True],
        "speed_up": speed_up,
        "counted": counted,
        "share_of_bound": speed_up / counted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["1M", "30M"], choices=SHAPES)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--prompt", type=int, default=1000)
    parser.add_argument("--response", type=int, default=100)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument(
        "--checkpointing", action="store_true", help="gradient checkpointing (not counted in the bound)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(name, args) for name in args.models]
    print(f"{'model':>6} {'unshared':>10} {'shared':>10} {'speed-up':>9} {'counted':>8} {'share of bound':>15}")
    for row in rows:
        print(
            f"{row['model']:>6} {row['unshared_s']:>9.3f}s {row['shared_s']:>9.3f}s {row['speed_up']:>8.2f}x "
            f"{row['counted']:>7.2f}x {row['share_of_bound']:>14.0%}"
        )
    if args.json:
        save(args.json, {"rows": rows})


if __name__ == "__main__":
    main()
