"""Runs the jobs of `busy.py`: a process of its own, with its own way to wait, asked by JSON lines.

Steps of GRPO come with the seconds of their rollout and update. The rollout is that of `rollout.py`, in the main thread
or in another, whose OpenMP team comes beside the main thread's.
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import verl  # noqa: F401  # before torch, as in every command

# isort: split
import rollout as rollout_benchmark
import torch
from support.jobs import stepper

from verl.config.rollout import RolloutConfig
from verl.workers.rollout.native.engine import NativeEngine

CASE = rollout_benchmark.Case(64, 64, natural=False)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # the run prints to stdout
    os.dup2(2, 1)
    config = RolloutConfig(
        dtype="float32", prompt_length=rollout_benchmark.PROMPT, response_length=CASE.new_tokens,
        max_num_seqs=CASE.batch,
    )  # fmt: skip
    engine = NativeEngine(config, rollout_benchmark.million_parameter_model())
    shape = (CASE.batch, rollout_benchmark.PROMPT)
    ids = torch.randint(0, rollout_benchmark.PAD, shape, generator=torch.Generator().manual_seed(0))

    def rollout() -> dict[str, float]:
        return {"rollout": rollout_benchmark.time_native(engine, ids, CASE, seed=0)[0]}

    with stepper(json.loads(sys.argv[1])) as job, ThreadPoolExecutor(1) as other_thread:

        def step() -> dict[str, float]:
            done = job.step()
            return {"step": done.seconds, "gen": done.timing_s["gen"], "update": done.timing_s["update_actor"]}

        def rollout_in_a_thread() -> dict[str, float]:
            return {"rollout in a second thread": other_thread.submit(rollout).result()["rollout"]}

        jobs = {"step": step, "rollout": rollout, "thread": rollout_in_a_thread}
        print(json.dumps({"threads": torch.get_num_threads()}), file=answers, flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            done = [jobs[asked["job"]]() for _ in range(asked["count"])]
            print(json.dumps(done), file=answers, flush=True)


if __name__ == "__main__":
    main()
