"""GRPO on a reward model that was trained from pairs: the judged reward rises.

make soak PART=reward_model                  # some minutes a seed on two cores; goes on where it stopped
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.soak.progress import RESULTS, ROOT, Progress

SEEDS = (1, 2, 3)
LEAST_PAIRS = 0.8  # of the held-out pairs, that the reward model orders
LEAST_RISE = 1.0  # of the judged reward, from the first tenth of the steps to the last


def run(seed: int, extra: list[str]) -> dict[str, Any]:
    """What one run of the example writes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": f"{folder}/metrics"}
        command = ["examples/reward_model/on_sums.py", "--out", f"{folder}/out", "--seed", str(seed), *extra]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)
        return json.loads(Path(folder, "out", "result.json").read_text())


def shortfalls(cases: dict[str, dict[str, Any]]) -> list[str]:
    """What misses its bar, a sentence each."""
    found = []
    for name, facts in cases.items():
        if facts["pairs right"] < LEAST_PAIRS:
            found.append(f"{name}: the reward model orders {facts['pairs right']:.1%} of held-out pairs")
        if facts["reward last"] < facts["reward first"] + LEAST_RISE:
            found.append(
                f"{name}: the judged reward goes from {facts['reward first']:.2f} to {facts['reward last']:.2f}"
            )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    options, extra = parser.parse_known_args()
    progress = Progress("reward_model", options.folder, keep_older=True)
    for seed in SEEDS:
        if not progress.done(name := f"seed {seed}"):
            facts = run(seed, extra)
            progress.record(name, 1, **facts)
            print(f"{name}: {facts}", flush=True)
    found = shortfalls(progress.cases)
    print("\n".join(found) or "every bar is kept")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
