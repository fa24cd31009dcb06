"""examples/pretrained with three seeds: a real pretrained model learns sums of two-digit numbers by GRPO on two cores.
Each seed gains more right answers on its held-out sums than the 95 % interval of the gain.

    python scripts/get_smollm2.py
    make soak PART=pretrained                    # about half an hour on two cores; goes on where it stopped
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.soak.progress import RESULTS, ROOT, Progress

SEEDS = (1, 2, 3)
LONGEST_S = 15 * 60  # of the example, on two quiet cores


def run(seed: int) -> dict[str, Any]:
    """result.json of one seed; exit code 1 of the example says that the gain is within its interval."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["examples/pretrained/run.py", "--out", f"{folder}/run", "--seed", str(seed)]
        done = subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=ROOT)
        result = Path(folder, "run", "result.json")
        if not result.is_file():
            raise SystemExit(f"seed {seed} did not end: exit code {done.returncode}; type: python {' '.join(command)}")
        return json.loads(result.read_text())


def shortfalls(cases: dict[str, dict[str, Any]]) -> list[str]:
    """What misses its bar, a sentence each."""
    found = []
    for name, case in cases.items():
        if case["gain"] <= (interval := case["gain_95_percent_half_width"]):
            found.append(f"{name} gains {case['gain']:.1%}, within its interval of {interval:.1%}")
        if case["seconds"] > LONGEST_S:
            found.append(f"{name} took {case['seconds']} s, over {LONGEST_S}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, choices=SEEDS, action="append", help="this one; may be repeated")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    options = parser.parse_args()
    progress = Progress("pretrained", options.folder, keep_older=True)
    for seed in options.seed or SEEDS:
        name = f"seed {seed}"
        if not progress.done(name):
            result = run(seed)
            progress.record(name, 1, seed=seed, **result)
            print(f"{name}: {result['before']:.0%} -> {result['after']:.0%} in {result['seconds']} s", flush=True)
    found = shortfalls(progress.cases)
    print("\n".join(found) or "every seed learns")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
