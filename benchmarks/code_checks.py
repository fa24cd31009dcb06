"""Trivial programs that the warm sandbox checks per second and core, beside the bar of 80.

    python benchmarks/code_checks.py [--json PATH] [--checks 2000] [--workers N] [--mode namespaces|fallback]

Each check is a program with one input in new namespaces (or a process of its own in the fallback), and a comparison.
"per core second" divides by the processor seconds of the grader and its workers (the programs among them), so
that other load on the machine does not count; "per second and core" divides by the clock and the cores that worked.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.record import save

from verl.rewards.sandbox import Sandbox, shared_sandbox
from verl.rewards.sandbox.pool import MODES
from verl.rewards.scorers import code

BAR = 80.0
ANSWER = "```python\nprint(int(input()) * 2)\n```"


def processor_seconds(pid: int) -> float:
    """Of a process, its children that ended, and those that live."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = [one for task in Path(f"/proc/{pid}/task").glob("*/children") for one in task.read_text().split()]
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(
        processor_seconds(int(one)) for one in children
    )


def check(number: int) -> None:
    row = code.score_answer(ANSWER, {"inputs": [str(number)], "outputs": [str(2 * number)]})
    assert row["score"] == 1.0, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--checks", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="at once (one per core)")
    parser.add_argument("--mode", nargs="+", default=MODES, choices=MODES)
    options = parser.parse_args()
    figures = {}
    for mode in options.mode:
        sandbox = Sandbox(options.workers, mode)
        code.shared_sandbox = lambda sandbox=sandbox: sandbox
        with ThreadPoolExecutor(options.workers) as threads:
            list(threads.map(check, range(4 * options.workers)))  # warm
            start, used = time.perf_counter(), processor_seconds(os.getpid())
            list(threads.map(check, range(options.checks)))
            clock_s, used_s = time.perf_counter() - start, processor_seconds(os.getpid()) - used
        sandbox.close()
        cores = min(options.workers, len(os.sched_getaffinity(0)))
        by_clock, by_use = options.checks / clock_s / cores, options.checks / used_s
        figures[mode] = {"checks": options.checks, "workers": options.workers, "per_second_and_core": by_clock}
        figures[mode] |= {"per_core_second": by_use, "bar": BAR, "ok": by_clock >= BAR}
        print(
            f"{mode:11} {by_clock:6.0f} checks per second and core, {by_use:6.0f} per core second used; bar {BAR:.0f}",
            flush=True,
        )
    code.shared_sandbox = shared_sandbox
    if options.json:
        save(options.json, {"code_checks": figures})


if __name__ == "__main__":
    main()
