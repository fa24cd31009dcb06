"""Time of a publish from sharded ranks to replicas on the same machine, against one gather and moving the bytes.

    python benchmarks/weight_sync_ranks.py --json benchmarks/results/weight_sync_ranks.json      # with vLLM installed

The 30M model of `weight_sync.py`, float32, FSDP2 over gloo. `publish`: until every replica samples from the new
version, with fingerprints on all sides, without a probe. `reload`: the own work of the slower replica's engine in the
same publish; `read_back`: its check that the layers compute with what arrived. `move`: the same bytes over the same
transport from one process to as many. `gather`: full weights on all ranks, without other work. Publishes, moves and
gathers run in turns, so that each finds the caches that another one has left; medians. The moves of two rounds say how
far apart the same work is: the share of a publish meets the bar if it misses it by less than the spread (p90 - p10) of
one move over the one before.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from support.record import save
from support.reload_clock import milliseconds_of_update
from transformers import AutoModelForCausalLM
from weight_sync import CONFIG, Mover, make_30m, milliseconds

from verl.checkpoint_engine.endpoint import TransportSettings
from verl.config import load_config
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.actor import build_actor_worker
from verl.workers.engine_worker import EngineWorker
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.router import Router

CASES = ((1, 2), (2, 1), (2, 2))  # ranks, replicas
BAR = 1.5


class GatheringWorker(EngineWorker):
    """A rank that can gather its weights and drop them."""

    def gather(self) -> int:
        return sum(tensor.nbytes for _, tensor in self.engine.export_weights())


def build_worker(folder: str) -> GatheringWorker:
    overrides = [f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.actor.fsdp_config.dtype=float32"]
    worker = build_actor_worker(load_config([*overrides, "algorithm.adv_estimator=grpo"]), 1)
    worker.__class__ = GatheringWorker
    return worker  # type: ignore[return-value]


def start_replica(folder: Path, number: int, reloads: Path) -> RemoteEngine:
    os.environ["VERL_BENCHMARK_RELOADS"] = str(reloads)  # what the server inherits
    engine = RemoteEngine(CONFIG, folder, replica=number)
    del os.environ["VERL_BENCHMARK_RELOADS"]
    return engine


def measure(root: Path, ranks: int, replicas: int, rounds: int, runner: asyncio.Runner) -> dict[str, Any]:
    """Milliseconds of one case."""
    folder, reloads = root / "model", [root / f"reload{number}" for number in range(replicas)]
    weights = list(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    engines = [start_replica(folder, number, file) for number, file in enumerate(reloads)]
    for engine in engines:
        engine.wait_until_ready()
    group = ProcessGroup(partial(build_worker, str(folder)), Layout.data_parallel(ranks))
    settings = TransportSettings("naive", 1 << 30, {}, "support.reload_clock")
    router = Router(engines)
    sync = CopySync(lambda: [], router, None, 0, WeightTransfer(settings, group, router))
    mover = Mover(settings, replicas)
    names = ("publish", "reload", "read_back", "move", "gather")
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        run = {
            "move": milliseconds(partial(mover.move, weights, number)),
            "gather": milliseconds(lambda: group.broadcast("gather")) if ranks > 1 else 0.0,
            "publish": milliseconds(partial(runner.run, sync.publish(number))),
        }
        updates = [milliseconds_of_update(file) for file in reloads]
        run |= {name: max(update[name] for update in updates) for name in ("reload", "read_back")}
        if number > 1:  # the first two warm up
            for name, value in run.items():
                times[name].append(value)
    mover.close()
    router.close()
    group.close()
    rounds_of = [dict(zip(times, values, strict=True)) for values in zip(*times.values(), strict=True)]
    moves = [r["move"] + r["gather"] for r in rounds_of]
    shares = [(r["publish"] - r["reload"]) / move for r, move in zip(rounds_of, moves, strict=True)]
    moving = [(r["publish"] - r["reload"] - r["read_back"]) / move for r, move in zip(rounds_of, moves, strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    same = [later / earlier for earlier, later in pairwise(moves)]
    share, spread = statistics.median(shares), spread_of(same)
    return {
        **medians,
        "share": share,
        "spread": spread,
        "met": share <= BAR or share - BAR < spread,
        "without_read_back": statistics.median(moving),
        "shares": shares,
    }


def spread_of(values: list[float]) -> float:
    """p90 - p10."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[-1] - deciles[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures: dict[str, Any] = {}
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as name:
        make_30m(Path(name))
        for ranks, replicas in CASES:
            case = figures[f"{ranks} ranks, {replicas} replicas"] = measure(
                Path(name), ranks, replicas, options.rounds, runner
            )
            print(
                f"{ranks} ranks, {replicas} replicas: publish {case['publish']:.0f} ms, reload {case['reload']:.0f}, "
                f"read back {case['read_back']:.0f}, move {case['move']:.0f}, gather {case['gather']:.0f}: "
                f"{case['share']:.2f} (bar {BAR}; a move over another {case['spread']:.2f} apart: "
                f"{'met' if case['met'] else 'missed'}), without reading back {case['without_read_back']:.2f}",
                flush=True,
            )
    if options.json:
        save(options.json, {"milliseconds": figures, "bar": BAR})


if __name__ == "__main__":
    main()
