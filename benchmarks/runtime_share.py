"""The driver's and the runtime's share of a step, and the seconds to join or to start Ray.

    python benchmarks/runtime_share.py [--rounds 5] [--json benchmarks/results/runtime_share.json]

Two ranks get 512 sequences of 1,024 tokens as in a run: for log-probs, then in four mini-batches for the update. A rank
sleeps SLEEP_S in all and answers with columns of the real sizes; what a step takes beyond that is the driver's work
(packing, advantages, shards, metrics) and the runtime's (sending, waiting, gathering). Runtimes take turns; medians.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.record import save
from torch import Tensor

from verl.algorithms.advantages import compute_advantages, with_token_rewards
from verl.config import RunConfig, load_config
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.trajectory import Trajectory
from verl.plugin.platform import choose_platform
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.processes import ProcessGroup
from verl.runtime.ray_cluster import Devices, join_cluster
from verl.runtime.ray_group import RayGroup
from verl.trainer.ppo.batch_metrics import data_metrics
from verl.workers.actor import Actor
from verl.workers.engine_worker import RankBatch

SEQUENCES, PROMPT, ANSWER, GROUP, UPDATES = 512, 128, 896, 8, 4
SLEEP_S = 2.0  # of a rank in a step: half for log-probs, half over the mini-batches
RANKS = Layout.data_parallel(2)
RAY = {"address": "local", "num_cpus": 4, "object_store_memory": 1 << 30}
BARS = {"share": 0.10, "join": 15.0, "start": 25.0}


class SleepingWorker:
    """A rank that takes its time, and answers with columns of the right size."""

    def model_facts(self) -> dict[str, Any]:
        return {"has_dropout": False, "attention_length": float("inf"), "can_cast": False}

    def forward(self, rank_batch: RankBatch, outputs: tuple[str, ...], *_: Any) -> tuple[Metrics, dict[str, Tensor]]:
        time.sleep(SLEEP_S / 2)
        return Metrics(), {name: torch.zeros(rank_batch[0].num_tokens) for name in outputs}

    def update(self, rank_batch: RankBatch, temperature: float) -> tuple[Metrics, dict[str, Tensor]]:
        time.sleep(SLEEP_S / 2 / UPDATES)
        return Metrics(), {name: torch.zeros(rank_batch[0].num_tokens) for name in ("logprobs", "entropy")}

    def advance_schedule(self) -> None: ...


def trajectories() -> list[Trajectory]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(150_000, (count,), generator=generator).tolist()

    return [
        Trajectory.from_completion(tokens(PROMPT), tokens(ANSWER), [-1.0] * ANSWER, group_id=i // GROUP, reward=i % 3)
        for i in range(SEQUENCES)
    ]


def configuration() -> RunConfig:
    actor = "actor_rollout_ref.actor"
    return load_config(
        [
            "actor_rollout_ref.model.path=none",
            "algorithm.adv_estimator=grpo",
            f"data.train_batch_size={SEQUENCES // GROUP}",
            f"{actor}.ppo_mini_batch_size={SEQUENCES // GROUP // UPDATES}",
            f"{actor}.use_dynamic_bsz=True",
        ]
    )


def one_step(config: RunConfig, actor: Actor, rows: list[Trajectory], number: int) -> float:
    """Seconds of the driver from scored trajectories to the metrics of the update."""
    begin = time.perf_counter()
    batch = Batch.pack(rows)
    batch = batch.with_columns(old_logprobs=actor.logprobs(batch))
    batch = compute_advantages(with_token_rewards(batch), config.algorithm)
    actor.update(batch, number)
    data_metrics(batch, PROMPT, ANSWER)
    return time.perf_counter() - begin


def steps(rounds: int) -> dict[str, list[float]]:
    """Seconds of a step by runtime."""
    config, rows = configuration(), trajectories()
    devices = Devices(choose_platform("cpu"))
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = join_cluster({**RAY, "_temp_dir": folder})
        groups: dict[str, WorkerGroup] = {
            "ray": RayGroup(SleepingWorker, RANKS, devices),
            "processes": ProcessGroup(SleepingWorker, RANKS),
        }
        actors = {runtime: Actor(config, group) for runtime, group in groups.items()}
        for number in range(rounds + 1):
            for runtime, actor in actors.items():
                taken = one_step(config, actor, rows, number)
                if number:  # the first warms up
                    seconds.setdefault(runtime, []).append(taken)
        for group in groups.values():
            group.close()
        cluster.leave()
    return seconds


def joined_ranks(settings: dict[str, Any]) -> float:
    """Seconds until two ranks on this Ray have answered."""
    begin = time.perf_counter()
    cluster = join_cluster(settings)
    group = RayGroup(SleepingWorker, RANKS, Devices(choose_platform("cpu")))
    group.broadcast("advance_schedule")
    taken = time.perf_counter() - begin
    group.close()
    cluster.leave()
    return taken


def in_process(*arguments: str) -> float:
    """What this file prints in a fresh process."""
    command = [sys.executable, __file__, *arguments]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.split()[-1])


def starts(rounds: int) -> dict[str, list[float]]:
    """Seconds until two ranks have answered, on a Ray that runs already and on one that starts for it."""
    seconds: dict[str, list[float]] = {"join": [], "start": []}
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        head = subprocess.Popen(
            [sys.executable, __file__, "--head", folder], stdout=subprocess.PIPE, text=True, process_group=0
        )
        assert head.stdout is not None
        address = head.stdout.readline().strip()
        for _ in range(rounds):
            seconds["join"].append(in_process("--join", address))
            seconds["start"].append(in_process("--join", "local"))
        head.send_signal(signal.SIGTERM)
        head.wait()
    return seconds


def be_head(folder: str) -> None:
    """Start a Ray, print its address and wait."""
    import ray

    cluster = join_cluster({**RAY, "_temp_dir": folder})
    print(ray.get_runtime_context().gcs_address, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        signal.pause()
    finally:
        cluster.leave()


def report(seconds: dict[str, list[float]], say: Callable[[float], float], unit: str) -> dict[str, float]:
    out = {}
    for name, times in seconds.items():
        values = sorted(say(taken) for taken in times)
        out[name] = statistics.median(values)
        print(f"{name:10} {out[name]:6.2f} {unit} ({values[0]:.2f} to {values[-1]:.2f} of {len(values)})", flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--join", help=argparse.SUPPRESS)
    parser.add_argument("--head", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ.pop("RAY_ADDRESS", None)  # of a cluster that is not for measuring
    if arguments.head:
        be_head(arguments.head)
    elif arguments.join:
        print(joined_ranks(RAY | {"address": arguments.join}))
    else:
        print(f"share of a step that is not the ranks' (bar {BARS['share']:.0%} on Ray)")
        taken = steps(arguments.rounds)
        shares = report(taken, lambda step: 100 * (1 - SLEEP_S / step), "%")
        print(f"until two ranks have answered (bars {BARS['join']:.0f} and {BARS['start']:.0f} s)")
        begun = starts(arguments.rounds)
        medians = report(begun, lambda start: start, "s")
        if arguments.json:
            figures = {"step_s": taken, "share_percent": shares, "begin_s": begun, "median_s": medians, "bars": BARS}
            save(arguments.json, figures)


if __name__ == "__main__":
    main()
