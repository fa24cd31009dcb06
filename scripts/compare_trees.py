"""The benchmarks of two checkouts in turns: the median of new / old over the pairs of runs, figure by figure.

    git worktree add ../old COMMIT
    python -m scripts.compare_trees ../old . --json benchmarks/results/two_trees.json      # five pairs; both trees idle

Each run is a fresh process whose imports come from its own tree. The spread (90th less 10th percentile) of neighbouring
runs of the old tree shows what a difference means. All figures are times: smaller is better.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.support.record import save

Figures = dict[str, float]  # times, in a unit of the benchmark's


@dataclass(frozen=True)
class Benchmark:
    """Its arguments, small enough for ten runs, and its figures in the JSON that it writes."""

    name: str
    arguments: tuple[str, ...]
    read: Callable[[dict[str, Any]], Figures]


def head(dtype: str) -> Benchmark:
    """One row: 256 tokens of d=896, without entropy."""

    def read(found: dict[str, Any]) -> Figures:
        [rows] = found["head"].values()
        return {row["path"]: row["seconds"] for row in rows["times"] if row["path"] != "eager"}

    sizes = ("--hidden", "896", "--tokens", "--time-tokens", "256", "--eager-tokens", "0", "--entropy", "0")
    return Benchmark("head", (*sizes, "--rounds", "2", "--dtype", dtype), read)


def transports(found: dict[str, Any]) -> Figures:
    """Of a publish of 30M parameters."""
    rows = found["milliseconds"]["30M"]
    return {"in process": rows["in process"]} | {name: rows[name]["publish"] for name in ("naive", "nccl", "file")}


BENCHMARKS = {
    "grpo_step": Benchmark(
        "grpo_step",
        ("--only", "equal", "--blocks", "2", "--steps", "3"),
        lambda found: {row["case"]: row["ours"]["step_s"] for row in found["rows"]},
    ),
    "rollout": Benchmark(
        "rollout",
        ("--only", "64 x", "--repeats", "2"),
        lambda found: {row["case"]: 1 / row["native_tokens_per_s"] for row in found["rows"]},
    ),
    "overhead": Benchmark(
        "overhead",
        ("--only", "quickstart", "--steps", "8"),
        lambda found: {row["job"]: row["outside"] * row["step_s"] for row in found["rows"]},
    ),
    "ranks": Benchmark(
        "ranks",
        ("--repeats", "3"),
        lambda found: {name: statistics.median(values) for name, values in found["seconds"].items()},
    ),
    "startup": Benchmark(
        "startup", ("--repeats", "1"), lambda found: {name: found[name] for name in ("first_step_s", "whole_s")}
    ),
    "weight_sync": Benchmark("weight_sync", ("--only", "30M", "--rounds", "4"), transports),
    "head float32": head("float32"),
    "head bfloat16": head("bfloat16"),
}


def run(tree: Path, benchmark: Benchmark, python: str) -> Figures:
    """The figures of one run of the tree's own benchmark; CalledProcessError with its lines shown where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [python, f"benchmarks/{benchmark.name}.py", *benchmark.arguments, "--json", str(result)]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(done.stdout + done.stderr, file=sys.stderr)
            done.check_returncode()
        return benchmark.read(json.loads(result.read_text()))


def spread(ratios: list[float]) -> float:
    """90th less 10th percentile."""
    deciles = statistics.quantiles(ratios, n=10, method="inclusive")
    return deciles[-1] - deciles[0]


def compare(old: list[Figures], new: list[Figures]) -> dict[str, dict[str, float]]:
    """Per figure: medians of both, of new / old over the pairs, and the spread of old / old over neighbouring runs."""
    return {
        name: {
            "old": statistics.median(run[name] for run in old),
            "new": statistics.median(run[name] for run in new),
            "ratio": statistics.median(b[name] / a[name] for a, b in zip(old, new, strict=True)),
            "spread": spread([b[name] / a[name] for a, b in itertools.pairwise(old)]),
        }
        for name in old[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", nargs="+", default=list(BENCHMARKS), choices=BENCHMARKS)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--vllm-python", default=sys.executable, help="of an environment with vLLM, for weight_sync")
    parser.add_argument("--json", type=Path, help="write the figures here; other benchmarks in the file stay")
    options = parser.parse_args()
    for name in options.only:
        python = options.vllm_python if name == "weight_sync" else sys.executable
        old: list[Figures] = []
        new: list[Figures] = []
        for number in range(options.pairs):
            for tree, figures in ((options.old, old), (options.new, new)):
                figures.append(run(tree.resolve(), BENCHMARKS[name], python))
            print(f"{name}: pair {number + 1} of {options.pairs}", flush=True)
        found = compare(old, new)
        for figure, values in found.items():
            print(f"{name}, {figure}: x {values['ratio']:.3f} (old against old: {values['spread']:.3f})", flush=True)
        if options.json:
            kept = json.loads(options.json.read_text())["figures"] if options.json.is_file() else {}
            save(options.json, {"figures": {**kept, name: found}})


if __name__ == "__main__":
    main()
