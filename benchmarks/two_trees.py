"""Another checkout against this one: each runs its own benchmarks, in turns with this one and this one once more.

    git worktree add /tmp/old COMMIT
    python benchmarks/two_trees.py /tmp/old [--pairs 5] [--only grpo_step] [--json benchmarks/results/two_trees.json]

A ratio is seconds of this tree over seconds of the other, of one pair; above 1 this one is slower. The spread,
p90 - p10, is that of this tree against itself. The bar is 1.03, or that and the spread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.record import save

HERE, BAR = Path(__file__).resolve().parents[1], 1.03
# The arguments of a benchmark, and its seconds from what it saves.
CASES: dict[str, tuple[list[str], Callable[[dict[str, Any]], float]]] = {
    "grpo_step": (["--blocks", "2", "--only", "equal"], lambda found: found["rows"][0]["ours"]["step_s"]),
    "grpo_step natural": (["--blocks", "1", "--only", "natural"], lambda found: found["rows"][0]["ours"]["step_s"]),
    "overhead": (["--only", "quickstart"], lambda found: found["rows"][0]["outside"]),
    "rollout": (["--only", "64 x (32 + 64)"], lambda found: 1 / found["rows"][0]["native_tokens_per_s"]),
    "startup": (["--repeats", "1"], lambda found: found["whole_s"]),
    "reward_wait": (["--only", "threads", "--answers", "64"], lambda found: found["reward_wait"]["threads"]["clock_s"]),
}  # fmt: skip


def seconds(tree: Path, case: str) -> float:
    """Seconds that the benchmark of `tree` has saved."""
    arguments, read = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, f"benchmarks/{case.split()[0]}.py", *arguments, "--json", str(file)]
        environment = {**os.environ, "PYTHONPATH": str(tree)}
        said = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if not file.is_file():
            raise SystemExit(f"{tree}: {' '.join(command)} saved nothing:\n{said.stdout[-2000:]}{said.stderr[-2000:]}")
        return read(json.loads(file.read_text()))


def commit(tree: Path) -> str:
    """The commit that is checked out in `tree`."""
    command = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def ratios(of: list[float], over: list[float]) -> dict[str, float]:
    """The median of the pairs' ratios, and p90 - p10 of them."""
    each = [a / b for a, b in zip(of, over, strict=True)]
    tenths = statistics.quantiles(each, n=10, method="inclusive")
    return {"median": statistics.median(each), "spread": tenths[8] - tenths[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the folder of the other checkout")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trees, rows = {"this": HERE, "other": args.other.resolve(), "again": HERE}, dict[str, dict[str, Any]]()
    commits = {name: commit(trees[name]) for name in ("this", "other")}
    for case in args.only:
        found: dict[str, list[float]] = {name: [] for name in trees}
        for pair in range(args.pairs):
            for name in [*trees][:: -1 if pair % 2 else 1]:
                found[name].append(seconds(trees[name], case))
        ratio, itself = ratios(found["this"], found["other"]), ratios(found["this"], found["again"])
        spread = itself["spread"]
        rows[case] = {**found, "ratio": ratio["median"], "spread": spread, "ok": ratio["median"] <= BAR + spread}
        print(f"{case}: {ratio['median']:.3f} (itself {itself['median']:.3f}, spread {spread:.3f})", flush=True)
        if args.json:
            save(args.json, {**commits, "bar": BAR, "pairs": args.pairs, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
