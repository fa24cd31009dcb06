"""One training step on long sequences: one rank with two threads against two ranks that split every sequence.

    python benchmarks/long_sequences.py [--json PATH] [--length 8192] [--sequences 1] [--repeats 3] [--model 1M]

Each setup runs twice in separate processes, in turns. Prints medians of the step time (forward, backward and optimiser
step) and the largest peak memory of a step on rank 0 above the memory before that step.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from prefix_sharing import SHAPES, build_engine, one_group
from support.memory import peak_bytes, reset_peak
from support.record import save

from verl.algorithms.losses import make_actor_loss
from verl.config import ActorConfig

SETUPS = {"1 rank, 2 threads": (1, 2), "2 ranks, 1 thread each": (2, 1)}


def run_steps(args: argparse.Namespace) -> None:
    """Runs steps on this rank; rank 0 prints a line of JSON."""
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(args.threads)
    if ranks > 1:
        dist.init_process_group("gloo")
    engine = build_engine(args.model, "fp32", args.length, False, ulysses_sequence_parallel_size=ranks)
    batch, loss = (
        one_group(SHAPES[args.model][-1], args.length - 256, 256, args.sequences),
        make_actor_loss(ActorConfig()),
    )
    seconds, memory = [], []
    for _ in range(args.repeats + 1):
        before = reset_peak()
        start = time.perf_counter()
        with engine.train_mode():
            engine.forward_backward(batch, loss)
            engine.optim_step()
        seconds.append(time.perf_counter() - start)
        memory.append(peak_bytes() - before)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"seconds": seconds[1:], "megabytes": max(memory[1:]) / 1e6}))


def launch_setup(ranks: int, threads: int, options: list[str]) -> dict[str, Any]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *launch, __file__, "--threads", str(threads), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", default="1M", choices=SHAPES)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.threads:
        return run_steps(args)
    options = [f"--{n}={getattr(args, n)}" for n in ("length", "sequences", "repeats", "model")]
    runs_by_setup: dict[str, list[dict[str, Any]]] = {way: [] for way in SETUPS}
    for _ in range(2):
        for way, (ranks, threads) in SETUPS.items():
            runs_by_setup[way].append(launch_setup(ranks, threads, options))
    rows = [
        {
            "way": way,
            "seconds": statistics.median([s for run in runs for s in run["seconds"]]),
            "megabytes_per_rank": max(run["megabytes"] for run in runs),
        }
        for way, runs in runs_by_setup.items()
    ]
    for row in rows:
        print(f"{row['way']:>24} {row['seconds']:>8.2f} s {row['megabytes_per_rank']:>8.0f} MB per rank")
    if args.json:
        save(args.json, {"model": args.model, "length": args.length, "sequences": args.sequences, "rows": rows})


if __name__ == "__main__":
    main()
