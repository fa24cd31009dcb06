"""The quickstart as a cluster runs it: two ranks with vLLM beside them, two ranks with vLLM apart, and on Ray.

Beside and apart: at least 85 % of the held-out problems. On Ray: the mean of its seeds as far from that of the same
seeds in one process as those differ among themselves, at most.

    make soak PART=quickstarts                   # about an hour on two cores; goes on where it stopped
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

ARR = "actor_rollout_ref"
TWO_RANKS_AND_VLLM = [
    "trainer.device=cpu", "trainer.n_gpus_per_node=2", f"{ARR}.rollout.name=vllm", f"{ARR}.rollout.enforce_eager=True",
    f"{ARR}.rollout.kv_cache_bytes=67108864", f"{ARR}.rollout.server.python={ROOT / '.venv-vllm' / 'bin' / 'python'}",
]  # fmt: skip
CASES = {
    "hybrid": [*TWO_RANKS_AND_VLLM, f"{ARR}.rollout.num_replicas=2"],
    "split": [*TWO_RANKS_AND_VLLM, f"{ARR}.hybrid_engine=False", f"{ARR}.rollout.n_gpus_per_node=2"],
    "ray": ["trainer.runtime=ray", "trainer.device=cpu"],
}
SEEDS = {"hybrid": [1], "split": [1], "ray": [1, 2, 3]}
LEAST = 0.85  # of the held-out problems, beside and apart
IN_ONE_PROCESS = ROOT / "benchmarks" / "results" / "quickstart.json"


def run(case: str, seed: int) -> dict[str, Any]:
    """The accuracies before and after, and the seconds, of one quickstart."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": f"{folder}/metrics"}
        environment.pop("RAY_ADDRESS", None)
        if case != "ray":
            environment["OMP_NUM_THREADS"] = "1"  # vLLM and the ranks share two cores
        command = ["-m", "verl.cli", "quickstart", "--out", f"{folder}/run", "--seed", str(seed), *CASES[case]]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL, env=environment, cwd=ROOT)
        return json.loads(Path(folder, "run", "result.json").read_text())


def shortfalls(cases: dict[str, dict[str, Any]]) -> list[str]:
    """What misses its bar, a sentence each."""
    found = [
        f"{name} solves {facts['after']:.1%}, less than {LEAST:.0%}"
        for name, facts in cases.items()
        if facts["case"] != "ray" and facts["after"] < LEAST
    ]
    on_ray = {facts["seed"]: facts["after"] for facts in cases.values() if facts["case"] == "ray"}
    rows = json.loads(IN_ONE_PROCESS.read_text())["rows"]
    alone = [row["after"] for row in rows if row["seed"] in on_ray]
    if alone:
        difference = abs(sum(on_ray.values()) / len(on_ray) - sum(alone) / len(alone))
        spread = max(row["after"] for row in rows) - min(row["after"] for row in rows)
        if difference > spread:
            found.append(f"on Ray {difference:.1%} from one process, whose seeds differ by {spread:.1%}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(CASES), action="append", help="this case; may be repeated")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    options = parser.parse_args()
    progress = Progress("quickstarts", options.folder, keep_older=True)
    for case in options.only or CASES:
        for seed in SEEDS[case]:
            name = f"{case}, seed {seed}"
            if not progress.done(name):
                result = run(case, seed)
                progress.record(name, 1, case=case, seed=seed, **result)
                print(
                    f"{name}: {result['before']:.1%} -> {result['after']:.1%} in {result['seconds']:.0f} s", flush=True
                )
    found = shortfalls(progress.cases)
    print("\n".join(found) or "all as they should be")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
