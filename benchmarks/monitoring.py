"""What the trackers `file` and `tensorboard` and the exporter for Prometheus cost a step of the 1M job.

    python benchmarks/monitoring.py [--json PATH] [--threads 2] [--pairs 10]

Three runs of one configuration and seed, in one process: without any of them, without any again, and with all of them
and a scrape per step. The steps are taken in turns, so step k of each run does the same work at the same time of day.
"""

import argparse
import os
import statistics
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import torch
from support.jobs import NATURAL, Stepper, grpo_overrides, prepare_1m, stepper
from support.record import save

from verl.observe.exporter import NAME, Exporter

OFF, AGAIN, ON = "off", "off again", "on"
LIMIT = 0.01  # of a step


def job_overrides(folder: Path, name: str) -> list[str]:
    on = ["trainer.logger=[file,tensorboard]", "trainer.prometheus_port=0"]
    run = name.replace(" ", "_")
    paths = [f"trainer.experiment_name={run}", f"trainer.default_local_dir={folder / run}"]
    return [*grpo_overrides(folder, NATURAL), *paths, *(on if name == ON else ["trainer.logger=[]"])]


def seconds_of_step(job: Stepper) -> tuple[float, int]:
    """Seconds of one step, a scrape included where there is an exporter; and its tokens."""
    exporter = job.run.tracking.backends.get(NAME)
    started = time.perf_counter()
    tokens = job.step().tokens
    if isinstance(exporter, Exporter):
        with urllib.request.urlopen(exporter.url, timeout=10) as answer:
            answer.read()
    return time.perf_counter() - started, tokens


def measure(folder: Path, pairs: int) -> list[dict]:
    """One row for each step: seconds and tokens of each run."""
    prepare_1m(folder)
    rows = []
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(stepper(job_overrides(folder, name))) for name in (OFF, AGAIN, ON)}
        for number in range(pairs + 2):
            names = [OFF, AGAIN, ON]
            order = [names[(number + place) % 3] for place in range(3)]
            found = {}
            for name in order:
                torch.manual_seed(number)
                found[name] = seconds_of_step(jobs[name])
            if number >= 2:  # after the warm-up
                rows.append({name: {"seconds": found[name][0], "tokens": found[name][1]} for name in names})
    return rows


def cost(rows: list[dict], name: str) -> dict[str, float]:
    """Median, lowest and highest share by which the steps of `name` take longer than those without, by token."""
    by_token = [
        row[name]["seconds"] / row[name]["tokens"] / (row[OFF]["seconds"] / row[OFF]["tokens"]) - 1 for row in rows
    ]
    return {"median": statistics.median(by_token), "lowest": min(by_token), "highest": max(by_token)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=10, help="measured steps of each run, after two of warm-up")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as temporary:
        os.environ |= {"VERL_FILE_LOGGER_ROOT": temporary, "TENSORBOARD_DIR": f"{temporary}/tensorboard"}
        rows = measure(Path(temporary), args.pairs)
    step = statistics.median(row[OFF]["seconds"] for row in rows)
    same = sum(row[OFF]["tokens"] == row[ON]["tokens"] for row in rows)
    print(f"{step:.3f} s a step without any of them; the same tokens in {same} of {len(rows)} pairs")
    summary = {name: cost(rows, name) for name in (AGAIN, ON)}
    for name, share in summary.items():
        print(f"{name:<10} {share['median']:+.2%} (from {share['lowest']:+.2%} to {share['highest']:+.2%})")
    print(f"at most {LIMIT:.0%}: {'yes' if summary[ON]['median'] <= LIMIT else 'NO'}")
    if args.json:
        save(args.json, {"step_s": step, "summary": summary, "rows": rows})


if __name__ == "__main__":
    main()
