"""PPO beside GRPO on the quickstart's task, for 240 steps: five seeds of each. In the mean PPO ends within 3 points of
GRPO, and its critic explains more of the returns at the end than at the start.

    make soak PART=ppo                           # about forty minutes on two cores; goes on where it stopped
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.soak.algorithms import MORE_SEEDS, read_points, run_seed
from scripts.soak.progress import RESULTS, ROOT, Progress

RECIPES = ("ppo", "grpo")
STEPS = 240
BEHIND = 0.03  # of GRPO's mean accuracy, allowed


def finals(cases: dict[str, dict[str, Any]], recipe: str) -> list[float]:
    """Held-out accuracy after training, a seed each."""
    return [case["final"] for case in cases.values() if case["recipe"] == recipe]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def explained(cases: dict[str, dict[str, Any]]) -> tuple[float, float]:
    """Share of the returns' variance that PPO's critic explains, in the first and in the last stretch of steps."""
    curves = [read_points(c["curves"]["explained_variance"]) for c in cases.values() if c["recipe"] == "ppo"]
    return mean([curve[0][1] for curve in curves]), mean([curve[-1][1] for curve in curves])


def sentence(cases: dict[str, dict[str, Any]]) -> str:
    """What was measured, for the page of the algorithms."""
    ppo, grpo = finals(cases, "ppo"), finals(cases, "grpo")
    before, after = explained(cases)
    return (
        f"In {STEPS} steps of the quickstart's task, ppo ends at {mean(ppo):.1%} in the mean of {len(ppo)} seeds, "
        f"grpo at {mean(grpo):.1%}. ppo's critic explains {before:.0%} of the variance of the returns in the first "
        f"steps and {after:.0%} in the last."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=MORE_SEEDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "ppo", help="of the runs")
    options = parser.parse_args()
    progress = Progress("ppo", options.folder, keep_older=True)
    failed = []
    for seed in range(1, options.seeds + 1):
        failed += run_seed(list(RECIPES), seed, options, progress)
    if failed:
        print(f"not trained: {'; '.join(failed)}", file=sys.stderr)
        return 1
    print(sentence(progress.cases))
    before, after = explained(progress.cases)
    return int(mean(finals(progress.cases, "ppo")) < mean(finals(progress.cases, "grpo")) - BEHIND or after <= before)


if __name__ == "__main__":
    sys.exit(main())
