"""Every recipe of examples/cpu/run.py on the quickstart's task, from one warm model a seed. Goes on where the last run
stopped, recipe by recipe; then draws docs/train/algorithms.md. A result stays when other code changes, with its commit;
`--again NAME` forgets those of a recipe, for a change of what it computes.

    make soak PART=algorithms                    # three seeds, five for some: about two and a half hours on two cores
    python -m scripts.soak.algorithms --recipes grpo gspo --seeds 1 --steps 60 --folder /tmp/soak
"""

import argparse
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.soak.progress import RESULTS, ROOT, Progress
from verl.observe.trackers import read_metrics
from verl.utils.external_code import load_module

cpu = load_module(str(ROOT / "examples" / "cpu" / "run.py"), "soak")
STEPS, SEEDS, MORE_SEEDS = 150, 3, 5
WITH_MORE_SEEDS = ("grpo", "ppo", "dapo", "gspo", "rloo")
VALIDATION, SAMPLED = "val-core/quickstart/addition/acc/mean@1", "reward/acc/mean"
CURVES = {
    "accuracy": SAMPLED,
    "kl": "actor/ppo_kl",
    "entropy": "actor/entropy",
    "length": "response_length/mean",
    "explained_variance": "critic/vf_explained_var",
}
THRESHOLD, WINDOW = 0.6, 5  # steps to 60 %: of the mean over so many steps


def facts(records: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows of a run: held-out accuracy before and after, steps to 60 %, and a curve a metric."""
    held_out = [r["data"][VALIDATION] for r in records if VALIDATION in r["data"]]
    curves = {
        name: [[r["step"], r["data"][metric]] for r in records if metric in r["data"]]
        for name, metric in CURVES.items()
    }
    accuracy = curves["accuracy"]
    reached = [
        step
        for i, (step, _) in enumerate(accuracy)
        if i + 1 >= WINDOW and sum(y for _, y in accuracy[i + 1 - WINDOW : i + 1]) / WINDOW >= THRESHOLD
    ]
    return {
        "start": held_out[0],
        "final": held_out[-1],
        "steps": records[-1]["step"],
        "steps_to_60": reached[0] if reached else None,
        "curves": {name: write_points(in_stretches(points)) for name, points in curves.items() if points},
    }


def in_stretches(points: list[list[float]], parts: int = 24) -> list[list[float]]:
    """Means over `parts` equal stretches of steps, at the last step of each."""
    size = max(1, -(-len(points) // parts))
    stretches = [points[i : i + size] for i in range(0, len(points), size)]
    return [[s[-1][0], float(f"{sum(y for _, y in s) / len(s):.4g}")] for s in stretches]


def write_points(points: list[list[float]]) -> str:
    """Points on one line of the record; `read_points` reads them."""
    return " ".join(f"{x:g}:{y:g}" for x, y in points)


def read_points(line: str) -> list[tuple[float, float]]:
    """The points that `write_points` wrote."""
    return [(float(x), float(y)) for x, y in (point.split(":") for point in line.split())]


def run_case(name: str, seed: int, steps: int, folder: Path, progress: Progress) -> bool:
    """Train; whether it trained to the end. Its lines are in `folder`/logs."""
    case = case_name(name, seed)
    metrics = folder / "metrics" / cpu.VARIABLES["PROJECT_NAME"] / f"{name}.jsonl"
    log = folder / "logs" / f"{name}.txt"
    extra = ["trainer.logger=[console,file]", "trainer.resume_mode=disable"]
    metrics.unlink(missing_ok=True)  # of a run that was stopped
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    log.parent.mkdir(exist_ok=True)
    begin = time.monotonic()
    with log.open("w") as output:
        if cpu.run(name, folder, seed, steps, extra, output) != 0:
            print(f"{case}: stopped with an error; {log} has its lines", file=sys.stderr, flush=True)
            return False
    found = facts(read_metrics(metrics))
    progress.record(case, 1, recipe=name, seed=seed, **found)
    gain = f"{found['start']:.1%} -> {found['final']:.1%} in {found['steps']} steps"
    print(f"{case}: {gain}, {time.monotonic() - begin:.0f} s", flush=True)
    return True


def case_name(recipe: str, seed: int) -> str:
    return f"{recipe}, seed {seed}"


def run_seed(names: list[str], seed: int, options: argparse.Namespace, progress: Progress) -> list[str]:
    """Train by each recipe that has no result for this seed, some at a time; the cases that failed."""
    names = [name for name in names if not progress.done(case_name(name, seed))]
    if not names:
        return []
    folder = options.out.absolute() / f"seed_{seed}"
    os.environ["VERL_FILE_LOGGER_ROOT"] = str(folder / "metrics")
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // options.jobs))
    (cpu.prepare_teacher if cpu.DISTILLATION in names else cpu.prepare)(folder, seed)
    with ThreadPoolExecutor(options.jobs) as pool:
        done = list(pool.map(lambda name: run_case(name, seed, options.steps, folder, progress), names))
    return [case_name(name, seed) for name, trained in zip(names, done, strict=True) if not trained]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipes = {"nargs": "+", "choices": list(cpu.RECIPES), "metavar": "NAME"}
    parser.add_argument("--recipes", default=list(cpu.RECIPES), **recipes)
    parser.add_argument("--again", default=[], help="recipes whose results are forgotten first", **recipes)
    parser.add_argument("--seeds", type=int, default=None, help="for every recipe (default: 3, and 5 for some)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "algorithms", help="of the runs")
    options = parser.parse_args()
    progress = Progress("algorithms", options.folder, keep_older=True)
    progress.forget([case for case, found in progress.cases.items() if found["recipe"] in options.again])
    failed = []
    for seed in range(1, MORE_SEEDS + 1):
        wanted = [r for r in options.recipes if seed <= (options.seeds or num_seeds(r))]
        failed += run_seed(wanted, seed, options, progress)
    if failed:
        print(f"not trained: {'; '.join(failed)}", file=sys.stderr)
    if options.folder == RESULTS:
        from scripts.algorithms_page import main as draw

        draw()
    return int(bool(failed))


def num_seeds(recipe: str) -> int:
    return MORE_SEEDS if recipe in WITH_MORE_SEEDS else SEEDS


if __name__ == "__main__":
    sys.exit(main())
