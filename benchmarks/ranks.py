"""Two ranks of one thread against one rank of two threads: the update of a 30M model, in turns.

    python benchmarks/ranks.py [--json PATH] [--repeats 3]

16 sequences of log-normal lengths (mean about 200 tokens), float32, FSDP2 over gloo, balanced micro-batches. Both
groups run all the time; the seconds are medians of `Actor.update`, optimiser step included.
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from support.record import save
from transformers import AutoModelForCausalLM, Qwen3Config

from verl.config import RunConfig, load_config
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup
from verl.workers.actor import Actor, build_actor_worker

SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def overrides(folder: Path) -> list[str]:
    actor = "actor_rollout_ref.actor"
    return [
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=16",
        f"{actor}.ppo_mini_batch_size=16",
        f"{actor}.fsdp_config.dtype=float32",
        f"{actor}.use_dynamic_bsz=True",
        f"{actor}.ppo_max_token_len_per_gpu=2048",
    ]


def random_batch(count: int = 16) -> Batch:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.8, 0.7, count), 8, 1000).astype(int)
    generator = torch.Generator().manual_seed(0)
    rows = [
        Trajectory.from_completion(
            torch.randint(8192, (64,), generator=generator).tolist(),
            torch.randint(8192, (int(n),), generator=generator).tolist(),
            [-1.0] * int(n),
            group_id=i,
            reward=0.0,
        )
        for i, n in enumerate(lengths)
    ]
    batch = Batch.pack(rows)
    advantages = torch.randn(batch.num_tokens, generator=generator) * batch["loss_mask"]
    return batch.with_columns(advantages=advantages, old_logprobs=batch["rollout_logprobs"])


def launch(config: RunConfig, ranks: int, threads: int) -> Actor:
    os.environ["OMP_NUM_THREADS"] = str(threads)  # what the ranks inherit
    return Actor(config, ProcessGroup(partial(build_actor_worker, config, 100), Layout.data_parallel(ranks)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE))
        parameters = sum(p.numel() for p in model.parameters())
        model.save_pretrained(name)
        config, batch = load_config(overrides(Path(name))), random_batch()
        actors = {"one rank, two threads": launch(config, 1, 2), "two ranks, one thread each": launch(config, 2, 1)}
        seconds: dict[str, list[float]] = {label: [] for label in actors}
        for turn in range(arguments.repeats + 1):
            for label, actor in actors.items():
                start = time.perf_counter()
                actor.update(batch, turn)
                if turn:  # the first warms up
                    seconds[label].append(time.perf_counter() - start)
        for actor in actors.values():
            actor.group.close()
    one, two = (statistics.median(times) for times in seconds.values())
    print(f"{parameters / 1e6:.1f}M parameters, {batch.num_tokens} tokens")
    for label, times in seconds.items():
        print(
            f"{label:28} {statistics.median(times):7.2f} s  {batch.num_tokens / statistics.median(times):7.0f} tokens/s"
        )
    print(f"two ranks run at {one / two:.2f} of one rank's rate (bar: 0.90)")
    if arguments.json:
        save(
            arguments.json,
            {"parameters": parameters, "tokens": batch.num_tokens, "seconds": seconds, "ratio": one / two},
        )


if __name__ == "__main__":
    main()
