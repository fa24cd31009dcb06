"""Seconds to the end of the first training step, in fresh processes: ours and (with --peer-python) TRL's in turns.

    python benchmarks/startup.py [--peer-python PATH] [--json PATH] [--repeats 5]

The 1M model, 16 prompts x 8 completions of 64 tokens, float32. "Imports" ends when every module the job needs is
imported; "first step" is the time from there to the end of the first step (loading, data, rollout, update, records).
"Whole" starts at the launch of the process and includes the start of the interpreter.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.jobs import EQUAL, grpo_overrides, prepare_1m
from support.peer import PEER_ENVIRONMENT, peer
from support.record import save

CHILD = """
import json, sys
from verl.trainer import main_ppo
from support.jobs import stepper
import time
imported = time.time()
with stepper(json.loads(sys.argv[1])) as job:
    job.step()
print(imported, time.time())
"""


def time_ours(folder: Path, threads: int) -> tuple[float, float]:
    """(seconds from the end of the imports, seconds from launch) to the end of our first step."""
    here = Path(__file__).resolve().parent
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": f"{here.parent}:{here}"}
    start = time.time()
    command = [sys.executable, "-c", CHILD, json.dumps(grpo_overrides(folder, EQUAL))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the job failed:\n{done.stderr[-2000:]}")
    imported, stepped = map(float, done.stdout.split()[-2:])
    return stepped - imported, stepped - start


def time_trl(python: str, folder: Path, threads: int) -> float:
    """Seconds from launch to the end of TRL's first step."""
    start = time.time()
    with peer(python, folder, EQUAL, threads) as trl:
        assert trl is not None
        trl.steps(1)
        return time.time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="Python of an environment with TRL")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    first, whole, peers = [], [], []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["VERL_FILE_LOGGER_ROOT"] = temporary
        prepare_1m(Path(temporary))
        time_ours(Path(temporary), args.threads)  # loads the files into the page cache
        for _ in range(args.repeats):
            seconds = time_ours(Path(temporary), args.threads)
            first.append(seconds[0])
            whole.append(seconds[1])
            if args.peer_python:
                peers.append(time_trl(args.peer_python, Path(temporary), args.threads))
    row = {
        "threads": args.threads,
        "repeats": args.repeats,
        "first_step_s": statistics.median(first),
        "whole_s": statistics.median(whole),
    }
    print(f"first step {row['first_step_s']:.2f} s after imports, {row['whole_s']:.2f} s after launch (medians)")
    if peers:
        row["trl_whole_s"] = statistics.median(peers)
        print(f"TRL {row['trl_whole_s']:.2f} s after launch: {row['trl_whole_s'] / row['whole_s']:.2f}x ours")
    else:
        print(PEER_ENVIRONMENT)
    if args.json:
        save(args.json, row)


if __name__ == "__main__":
    main()
