"""Asynchronous runs, killed at random moments until they end.

    make soak PART=asynchronous                  # 23 kills of each case, 207 in all; two cases at a time
    python -m scripts.soak.asynchronous --kills 2 --only drop

events.jsonl is asked whether every prompt was trained once or named as dropped. On the rollout's devices, weights,
optimiser state, ledger and metrics but times are also those of a run that was never killed, bit for bit; with devices
of its own for the rollout, what a step takes depends on the time. Goes on where the last run of this commit stopped.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.soak.progress import RESULTS, Progress
from tests.e2e import jobs
from tests.e2e.test_async_runs import ASYNC, assert_trained_once_or_dropped
from tests.e2e.test_resume import assert_same_run
from tests.e2e.test_separate_runs import LONG, SEPARATE
from verl.trainer.run.checkpoints import complete_steps

STEPS, KILLS = 6, 23
KILL_WITHIN_S = 0.5  # of a step's beginning; twice as long after each process that has saved nothing
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
MAIN = [sys.executable, "-m", "verl.trainer.main_ppo"]
PREPARING = threading.Lock()  # random weights come from one generator of this process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=KILLS, help="of each case (default: %(default)s)")
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    progress = Progress("asynchronous", args.folder)
    with ThreadPoolExecutor(args.jobs) as pool:
        cases = [args.only] if args.only else list(CASES)
        passed = list(pool.map(lambda case: run_case(case, args.kills, progress), cases))
    return 0 if all(passed) else 1


def run_case(case: str, kills: int, progress: Progress) -> bool:
    """Run `case` until it was killed so often; False, and why, where something was lost or happened twice."""
    while (done := progress.done(case)) < kills:
        try:
            more = killed_until_it_ends(case, done)
        except (Exception, AssertionError):
            print(f"{case}, after {done} kills:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            return False
        progress.record(case, more)
        print(f"{case}: {done + more} kills, nothing lost, nothing twice", flush=True)
    return True


def killed_until_it_ends(case: str, seed: int) -> int:
    """One run, killed at a random moment of each of its processes; returns how often."""
    draws, kills, in_vain = random.Random(f"{case} {seed}"), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "VERL_FILE_LOGGER_ROOT": str(folder / "metrics")}
        with PREPARING:
            jobs.prepare(folder)
        how = [*CASES[case], "trainer.save_freq=1", "trainer.test_freq=2"]
        quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if case not in DEPENDS_ON_TIME:
            subprocess.run([*MAIN, *jobs.overrides(folder, "whole", *how)], check=True, **quiet)
        while True:
            run = subprocess.Popen([*MAIN, *jobs.overrides(folder, "killed", *how)], **quiet)
            wait_for_a_step(run, folder / "killed" / ("ledger" if case == "synchronous apart" else "events.jsonl"))
            saved = complete_steps(folder / "killed")
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(draws.uniform(0.0, KILL_WITHIN_S * 2**in_vain))
            run.kill()
            if run.wait() == 0:
                break
            assert run.returncode == -signal.SIGKILL, f"it ended by itself with exit code {run.returncode}"
            kills += 1
            in_vain = in_vain + 1 if complete_steps(folder / "killed") == saved else 0
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
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())
