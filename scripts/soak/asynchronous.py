"""Asynchronous runs, killed at random moments until they end.

    make soak PART=asynchronous                  # 50 kills of each case
    python -m scripts.soak.asynchronous --kills 2 --only drop

events.jsonl is asked whether every prompt was trained once or named as dropped. On the rollout's devices, weights,
optimiser state, ledger and metrics but times are also those of a run that was never killed, bit for bit; with devices
of its own for the rollout, what a step takes depends on the time. Goes on where the last run of this commit stopped.
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
from tests.e2e.test_separate_runs import LONG, SEPARATE

STEPS = 6
DROP = ["trainer.v1.sampler.max_off_policy_strategy=drop", "trainer.v1.sampler.max_off_policy_threshold=2"]
CASES = {
    "synchronous": [ASYNC, "async_training.staleness_threshold=0"],
    "wait": [ASYNC, "async_training.staleness_threshold=1.5"],
    "drop": [ASYNC, *DROP],
    "remax": [ASYNC, "algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.max_num_seqs=8"],
    "synchronous apart": [*SEPARATE, "async_training.staleness_threshold=0"],
    "one step off": [*SEPARATE, *LONG, "--config-name=one_step_off_ppo_trainer"],
    "in parts": [*SEPARATE, *LONG, "actor_rollout_ref.actor.ppo_mini_batch_size=2"],
    "two replicas": [*SEPARATE, *LONG, "actor_rollout_ref.rollout.n_gpus_per_node=2"],
    "drop apart": [*SEPARATE, *LONG, *DROP],
}
DEPENDS_ON_TIME = ("one step off", "in parts", "two replicas", "drop apart")


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
        how = [*CASES[case], "trainer.save_freq=1", "trainer.test_freq=2"]
        if case not in DEPENDS_ON_TIME:
            jobs.train(folder, "whole", *how)
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *jobs.overrides(folder, "killed", *how)]
        while True:
            run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for_a_step(run, folder / "killed" / ("ledger" if case == "synchronous apart" else "events.jsonl"))
            time.sleep(draws.uniform(0.0, 3.0))  # a step and its save end in most processes
            run.kill()
            if run.wait() == 0:
                break
            kills += 1
        if case not in DEPENDS_ON_TIME:
            assert_same_run(folder, "whole", "killed", step=STEPS)
        if case != "synchronous apart":  # which has nothing under way, and writes no events
            assert_trained_once_or_dropped(folder / "killed")
    return kills


def wait_for_a_step(run: "subprocess.Popen[bytes]", records: Path) -> None:
    """Until this process has taken the answers of a step, or has ended. `records`: a file or folder that says so."""

    def written() -> int:
        return records.stat().st_mtime_ns if records.exists() else 0

    before = written()
    while run.poll() is None and written() == before:
        time.sleep(0.002)


if __name__ == "__main__":
    sys.exit(main())
