"""Failures injected into small groups, runs and replicas: each must be named with its culprit, and nothing else be. And
steps of ten minutes that are none. Goes on where the last run of this commit stopped.

    make soak PART=failures                      # about 50 minutes on two cores
    python -m scripts.soak.failures --rounds 1 --quiet-minutes 1 --cases 'killed rank' 'full disk' --folder /tmp/soak

Rank, moment and kind of a repetition follow from its number. The record has what was printed where a repetition failed.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from scripts.soak import injections, injections_in_groups, injections_on_ray
from scripts.soak.injections import Inject, Wrong
from scripts.soak.injections_in_groups import SoakWorker
from scripts.soak.progress import RESULTS, Progress
from tests.e2e import jobs
from verl.runtime.group import Layout
from verl.runtime.processes import ProcessGroup

OFTEN, SELDOM, QUIET_MINUTES = 20, 5, 10.0
SHOWN = 4000  # characters of what was printed, in the record

Case = Callable[[], AbstractContextManager[Inject]]
OFTEN_CASES: dict[str, Case] = {
    "killed rank": partial(injections.lost_rank, "SIGKILL"),
    "stopped rank": partial(injections.lost_rank, "SIGSTOP"),
    "killed replica": partial(injections.lost_replica, signal.SIGKILL),
    "stopped replica": partial(injections.lost_replica, signal.SIGSTOP),
}
SELDOM_CASES: dict[str, Case] = {
    "lost node": injections_on_ray.lost_node,
    "starved queue": injections_in_groups.starved_queue,
    "collective not all entered": injections_in_groups.skipped_collective,
    "unequal micro-batch counts": injections_in_groups.uneven_micro_batches,
    "grader or tool that never returns": injections.hanging_call,
    "full disk": injections.full_disk,
    "full object store": injections_on_ray.full_store,
    "address in use": injections_in_groups.address_in_use,
    "two networks": injections_in_groups.separate_networks,
}


@contextmanager
def quiet(method: str, seconds: float) -> Iterator[Inject]:
    """A call in which one rank works and the other waits for it, with the default timeout."""

    def inject(draw: Random) -> str:
        with tempfile.TemporaryDirectory() as folder:
            jobs.prepare(Path(folder))
            arguments = [seconds, f"{folder}/model"] if method == "load_models" else [seconds]
            group = ProcessGroup(SoakWorker, Layout.data_parallel(2))
            try:
                group.broadcast(method, *arguments)
            finally:
                group.close()
        return "no alarm"

    yield inject


def quiet_cases(minutes: float) -> dict[str, Case]:
    methods = {"one C call": "hash", "a compilation": "compile", "the load of a model": "load_models"}
    return {f"no alarm: {name}": partial(quiet, method, 60 * minutes) for name, method in methods.items()}


def run_case(name: str, case: Case, rounds: int, progress: Progress) -> None:
    """Inject until `rounds` are recorded, in a new context after one that failed."""
    while progress.done(name) < rounds:
        with case() as inject:
            while progress.done(name) < rounds and run_once(name, inject, progress):
                pass


def run_once(name: str, inject: Inject, progress: Progress) -> bool:
    """One repetition, recorded; whether the culprit was right."""
    number, begin = progress.done(name), time.monotonic()
    earlier: dict[str, Any] = progress.cases.get(name, {})
    wrong, seconds = list(earlier.get("wrong", [])), earlier.get("seconds", 0.0)
    try:
        said, is_right = inject(Random(f"{name} {number}")), True
    except Exception as error:  # whatever it is, the soak goes on to the next repetition
        said, is_right = f"{type(error).__name__ if not isinstance(error, Wrong) else 'wrong'}: {error}", False
        wrong.append({"repetition": number, "lines": said[:SHOWN].splitlines()})
    seconds += time.monotonic() - begin
    progress.record(name, 1, wrong=wrong, seconds=round(seconds, 1))
    print(f"{name} {number + 1}: {'right' if is_right else said}, {time.monotonic() - begin:.0f} s", flush=True)
    return is_right


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help=f"of every case (default: {OFTEN} or {SELDOM})")
    parser.add_argument("--quiet-minutes", type=float, default=QUIET_MINUTES, help="of each step that is no failure")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="those whose names have one of these words")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the record")
    options = parser.parse_args(arguments)
    progress = Progress("failures", options.folder)
    chosen = [(name, case, options.rounds or OFTEN) for name, case in OFTEN_CASES.items()]
    chosen += [(name, case, options.rounds or SELDOM) for name, case in SELDOM_CASES.items()]
    still = [(name, case, 1) for name, case in quiet_cases(options.quiet_minutes).items()]
    if options.cases:
        chosen, still = ([one for one in cases if any(w in one[0] for w in options.cases)] for cases in (chosen, still))
    for name, case, rounds in chosen:
        run_case(name, case, rounds, progress)
    with ThreadPoolExecutor(max(1, len(still))) as pool:  # side by side: they only have to last
        list(pool.map(lambda one: run_case(*one, progress), still))
    found = {name: progress.cases[name] for name, _, _ in chosen + still}
    for name, facts in found.items():
        rounds, wrong, each_s = facts["rounds"], len(facts["wrong"]), facts["seconds"] / facts["rounds"]
        print(f"{name}: {rounds} times, {wrong} wrong, {each_s:.0f} s each")
    return int(any(facts["wrong"] for facts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
