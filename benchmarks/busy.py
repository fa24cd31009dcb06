"""A training step and the rollout beside busy programs, over their time alone; threads that wait sleep, or spin.

    python benchmarks/busy.py [--pairs 5] [--json benchmarks/results/busy.json]
    python benchmarks/busy.py --quickstart [--pairs 2] [--policies sleep] [--json PATH]

One busy process per two cores, each pair alone and beside them in turns, in both policies; medians over pairs. "sleep"
is what verl sets (OMP_WAIT_POLICY=PASSIVE), "spin" what GNU's OpenMP does by itself (GOMP_SPINCOUNT=300000).
The step is that of the README's second part: GRPO on the quickstart's model, 32 prompts x 16 answers. Its rollout is
"gen"; "rollout" is that of `rollout.py` with 64 x (32 + 64), in the main thread and in a second one.
The processes of the policies are stopped while the other runs. For an otherwise idle machine: close everything else.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import verl  # noqa: F401  # before torch
from verl.utils.cores import num_cores

HERE = Path(__file__).resolve().parent
POLICIES = {"sleep": {"OMP_WAIT_POLICY": "PASSIVE"}, "spin": {"GOMP_SPINCOUNT": "300000"}}
CHOICES = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS"}
COUNTS = {"step": 3, "rollout": 10, "thread": 10}  # how often a job is done in one turn


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """So many other programs compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        time.sleep(0.5 if others else 0.0)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def in_turns(policies: list[str], pairs: int) -> Iterator[tuple[int, str, int]]:
    """(pair, policy, busy processes), each pair in the reverse order of the one before."""
    turns = [(policy, others) for policy in policies for others in (0, max(1, num_cores() // 2))]
    for pair in range(pairs):
        for policy, others in turns if pair % 2 else reversed(turns):
            yield pair, policy, others


def measure_jobs(policies: list[str], pairs: int) -> list[dict[str, Any]]:
    """Seconds of each job, a row for each pair, policy and number of busy processes."""
    from support.jobs import prepare_quickstart
    from support.peer import RequestProcess

    rows = []
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        os.environ["VERL_FILE_LOGGER_ROOT"] = temporary
        tutorial = ["data.train_batch_size=32", "actor_rollout_ref.actor.ppo_mini_batch_size=32"]
        tutorial += ["actor_rollout_ref.rollout.n=16", "actor_rollout_ref.actor.optim.lr=1e-6"]  # of steady lengths
        overrides, workers = [*prepare_quickstart(folder), *tutorial], {}
        for policy in policies:
            own = [f"trainer.default_local_dir={folder / policy}", f"trainer.experiment_name={policy}"]
            command = [sys.executable, str(HERE / "support" / "busy_jobs.py"), json.dumps([*overrides, *own])]
            paths = {"PYTHONPATH": f"{HERE.parent}:{HERE}", "OMP_NUM_THREADS": str(num_cores())}
            workers[policy] = RequestProcess(command, folder / f"{policy}.log", paths | POLICIES[policy])
            stack.callback(workers[policy].close)
            for job in COUNTS:
                workers[policy].request({"job": job, "count": 3})  # warms up, and stops it
        for pair, policy, others in in_turns(policies, pairs):
            with busy(others):
                done = [workers[policy].request({"job": job, "count": count}) for job, count in COUNTS.items()]
            times = {name: statistics.median(one[name] for one in some) for some in done for name in some[0]}
            rows.append({"pair": pair, "policy": policy, "busy": others, **times})
            print(rows[-1], flush=True)
    return rows


def measure_quickstarts(policies: list[str], pairs: int) -> list[dict[str, Any]]:
    """Seconds of whole quickstarts."""
    inherited, rows = {name: value for name, value in os.environ.items() if name not in CHOICES}, []
    for pair, policy, others in in_turns(policies, pairs):
        with tempfile.TemporaryDirectory() as folder, busy(others):
            paths = {"VERL_FILE_LOGGER_ROOT": f"{folder}/metrics", "PYTHONPATH": str(HERE.parent)}
            command = [sys.executable, "-m", "verl.cli", "quickstart", "--out", folder]
            shown = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run(command, check=True, env=inherited | paths | POLICIES[policy], **shown)
            seconds = json.loads(Path(folder, "result.json").read_text())["seconds"]
        rows.append({"pair": pair, "policy": policy, "busy": others, "quickstart": seconds})
        print(rows[-1], flush=True)
    return rows


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each job and policy: medians alone and beside others, and of the ratios of the pairs."""
    table = []
    for name in [key for key in rows[0] if key not in ("pair", "policy", "busy")]:
        times = {(row["policy"], bool(row["busy"]), row["pair"]): row[name] for row in rows}
        for policy in dict.fromkeys(row["policy"] for row in rows):
            alone, beside = ([t for (p, b, _), t in times.items() if (p, b) == (policy, w)] for w in (False, True))
            pairs = [pair for p, b, pair in times if (p, b) == (policy, False)]
            line = {"job": name, "policy": policy, "alone_s": statistics.median(alone)}
            line["busy_s"] = statistics.median(beside)
            line["busy_over_alone"] = statistics.median(times[policy, True, i] / times[policy, False, i] for i in pairs)
            if policy == "sleep" and ("spin", False, pairs[0]) in times:
                over = [times["sleep", False, i] / times["spin", False, i] for i in pairs]
                line["alone_over_spin_alone"] = statistics.median(over)
            table.append(line)
    return table


def show(table: list[dict[str, Any]]) -> None:
    print(f"\n{'job':<28}{'threads':<9}{'alone s':>9}{'busy s':>9}{'busy/alone':>12}{'alone, over spin':>18}")
    for line in table:
        over = f"{line['alone_over_spin_alone']:>17.2f}x" if "alone_over_spin_alone" in line else ""
        print(
            f"{line['job']:<28}{line['policy']:<9}{line['alone_s']:>9.3f}{line['busy_s']:>9.3f}"
            f"{line['busy_over_alone']:>11.2f}x{over}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=int, help="turns of each (5; 2 of the quickstart)")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--quickstart", action="store_true", help="whole quickstarts instead; minutes each")
    args = parser.parse_args()
    pairs = args.pairs or (2 if args.quickstart else 5)
    load = os.getloadavg()[0]
    print(f"{num_cores()} cores, {max(1, num_cores() // 2)} busy processes; load at the start {load:.1f}", flush=True)
    rows = (measure_quickstarts if args.quickstart else measure_jobs)(args.policies, pairs)
    table = summarize(rows)
    show(table)
    if args.json:
        from support.record import save

        save(args.json, {"cores": num_cores(), "load_at_the_start": load, "table": table, "rows": rows})


if __name__ == "__main__":
    main()
