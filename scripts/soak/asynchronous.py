"""Asynchronous runs, killed at random moments until they end: each ends like the one that was never killed.

    make soak PART=asynchronous                  # 50 kills of each case
    python -m scripts.soak.asynchronous --kills 2 --only drop

Weights, optimiser state, ledger and metrics but times are compared bit for bit, and events.jsonl is asked whether every
prompt was trained once or named as dropped. Goes on where the last run of this commit stopped.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.soak.progress import RESULTS, Progress
from tests.e2e import jobs
from tests.e2e.test_async_runs import ASYNC, assert_trained_once_or_dropped
from tests.e2e.test_resume import assert_same_run

STEPS = 6
CASES = {
    "synchronous": ["async_training.staleness_threshold=0"],
    "wait": ["async_training.staleness_threshold=1.5"],
    "drop": ["trainer.v1.sampler.max_off_policy_strategy=drop", "trainer.v1.sampler.max_off_policy_threshold=2"],
    "remax": ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.max_num_seqs=8"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    progress = Progress("asynchronous", args.folder)
    for case in [args.only] if args.only else CASES:
        while (done := progress.done(case)) < args.kills:
            kills = killed_until_it_ends(case, done)
            progress.record(case, kills)
            print(f"{case}: {done + kills} kills, nothing lost, nothing twice", flush=True)
    return 0


def killed_until_it_ends(case: str, seed: int) -> int:
    """One run, killed at a random moment of each of its processes; returns how often."""
    draws, kills = random.Random(f"{case} {seed}"), 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["VERL_FILE_LOGGER_ROOT"] = str(folder / "metrics")
        jobs.prepare(folder)
        how = [ASYNC, "trainer.save_freq=1", "trainer.test_freq=2", *CASES[case]]
        jobs.train(folder, "whole", *how)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *jobs.overrides(folder, "killed", *how)]
        while True:
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for_a_step(run, folder / "killed" / "events.jsonl")
            time.sleep(draws.uniform(0.0, 3.0))  # a step and its save end in most processes
            run.kill()
            if run.wait() == 0:
                break
            kills += 1
        assert_same_run(folder, "whole", "killed", step=STEPS)
        assert_trained_once_or_dropped(folder / "killed")
    return kills


def wait_for_a_step(run: "subprocess.Popen[bytes]", events: Path) -> None:
    """Until this process has taken the answers of a step, or has ended."""
    before = events.stat().st_size if events.exists() else 0
    while run.poll() is None and (not events.exists() or events.stat().st_size == before):
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
