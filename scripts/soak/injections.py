"""What the soak of failures does to real groups, runs and replicas, and which words must name the culprit.

Each injection is a context manager that yields a function: given the draws of a repetition it injects the failure, and
returns what was printed, or raises `Wrong`. What all repetitions of a case share lives as long as the context.
"""

import asyncio
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

from scripts.soak.progress import ROOT
from tests.contract.test_lost_replicas import Run, check_answers, some_requests
from tests.e2e import jobs
from verl.agent.tools import call_tool, load_tools

Inject = Callable[[Random], str]
STALL_S, RUN_LIMIT_S = 2.0, 600.0
STEPS = 4


class Wrong(Exception):
    """The culprit is missing or wrong, or the run did not go on or end as documented; with what was printed."""


def expect(said: str, *wanted: str, never: str | None = None) -> str:
    """`said`, if it has all that is `wanted`, and nothing of `never` (regular expressions)."""
    for pattern in wanted:
        if not re.search(pattern, said):
            raise Wrong(f"missing: {pattern}\n{said}")
    if never is not None and (found := re.search(never, said)):
        raise Wrong(f"must not be said: {found[0]}\n{said}")
    return said


def others(culprit: int) -> str:
    """That any other rank is the culprit."""
    return f"error: rank (?!{culprit}\\b)\\d+ failed|^rank (?!{culprit}\\b)\\d+ failed"


# --- runs --------------------------------------------------------------------------------------------------------

DISTURB = """
import os, signal, threading
from pathlib import Path
from verl.workers.engine_worker import EngineWorker

original, calls, mark = EngineWorker.{method}, [], Path({mark!r})

def disturb(self, *arguments):
    calls.append(1)
    if os.environ.get("RANK") == "{rank}" and len(calls) == {call} and not mark.exists():
        mark.write_text(str(len(list(Path({run!r}).glob("global_step_*")))))
        threading.Timer({delay}, os.kill, (os.getpid(), signal.{signal})).start()
    return original(self, *arguments)

EngineWorker.{method} = disturb
"""


def run_command(words: list[str], folder: Path, *before: str, **variables: str) -> tuple[int, str]:
    """Exit code and lines of the main job, after the words `before`; Wrong if it does not end."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1", **variables}
    environment["VERL_FILE_LOGGER_ROOT"] = str(folder / "metrics")
    command = [*before, sys.executable, "-m", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=RUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise Wrong(f"it did not end within {RUN_LIMIT_S:g} s\n{process.communicate()[0]}") from None
    return process.returncode, said


def main_job(folder: Path, *extra: str) -> list[str]:
    """The words of a main job of STEPS steps on what `jobs.prepare` has made."""
    steps = [f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.device=cpu"]
    return ["verl.trainer.main_ppo", *jobs.overrides(folder, "run", *steps, "trainer.logger=[console,file]", *extra)]


def check_end(goes_on: bool, code: int, said: str) -> str:
    """`said`, if the exit code is that of a run that went on to its end, or of one that an error has ended."""
    if goes_on == (code != 0):
        raise Wrong(f"the exit code is {code}\n{said}")
    return said


@contextmanager
def lost_rank(what: str) -> Iterator[Inject]:
    """One of two ranks of a run is killed (SIGKILL) or stopped (SIGSTOP) in or after one of its calls."""

    def inject(draw: Random) -> str:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            jobs.prepare(folder)
            rank, method = draw.randrange(2), draw.choice(["update", "save", "advance_schedule"])
            settings = {"rank": rank, "method": method, "signal": what, "delay": draw.choice([0.0, 0.05, 0.2])}
            settings |= {"call": draw.randrange(1, STEPS), "mark": f"{folder}/mark", "run": f"{folder}/run"}
            (folder / "disturb.py").write_text(DISTURB.format(**settings))
            ranks = ["trainer.n_gpus_per_node=2", f"trainer.stall_timeout_s={STALL_S}"]
            code, said = run_command(main_job(folder, *ranks, f"{jobs.ARR}.model.external_lib=disturb"), folder)
            said = f"{settings}\n{said}"
            if not (folder / "mark").exists():
                raise Wrong(f"nothing was injected\n{said}")
            why = "was killed by SIGKILL" if what == "SIGKILL" else "it is stopped: somebody sent it SIGSTOP"
            culprit = f"(?s)error: rank {rank} failed in .*{why}"
            if (folder / "mark").read_text() == "0" and "nothing could be restarted" in said:
                return check_end(False, code, expect(said, culprit, never=others(rank)))
            expect(said, culprit, "restart 1 of 3: all ranks, from step [1-9]", never=f"restart 2|{others(rank)}")
            return check_end((folder / "run" / f"global_step_{STEPS}" / "trainer.json").exists(), code, said)

    yield inject


@contextmanager
def lost_replica(what: signal.Signals) -> Iterator[Inject]:
    """One of two replicas is killed or stopped while they answer; another process takes its place."""
    with tempfile.TemporaryDirectory() as name:
        run, versions, numbers = Run(Path(name), 1_000_000), iter(range(1 << 30)), iter(range(0, 1 << 30, 10))
        try:
            run.publish(next(versions))

            def inject(draw: Random) -> str:
                replica, version = draw.randrange(2), run.router.version
                with said_by_logs() as lines:
                    requests = some_requests(next(numbers))
                    hit = partial(run.signal, replica, what)
                    answers = run.answers(requests, hit, after_s=draw.uniform(0.05, 0.9))
                    check_answers(requests, answers, version)
                    run.wait_for_replacement(replica)
                    receipt = run.publish(next(versions))
                    check_answers(
                        again := some_requests(next(numbers)), run.answers(again, lambda: None), receipt.version
                    )
                why = "its process ended with signal SIGKILL" if what == signal.SIGKILL else "no sign of life.*SIGSTOP"
                said = lines.getvalue()
                expect(said, f"(?s)rollout replica {replica}: .*{why}", never=f"rollout replica {1 - replica}:")
                if (receipt.num_replicas, len(run.router.replicas)) != (2, 2):
                    raise Wrong(f"{receipt.num_replicas} replicas after the publish\n{said}")
                return said

            yield inject
        finally:
            run.router.close()


@contextmanager
def said_by_logs() -> Iterator[io.StringIO]:
    """The warnings of the library meanwhile."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    handler.setLevel(logging.WARNING)
    logging.getLogger().addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def hanging_call() -> Iterator[Inject]:
    """A grader, or a tool, that never returns."""

    def grader(draw: Random, folder: Path) -> str:
        jobs.prepare(folder)
        count, hangs_at = draw.random() < 0.5, draw.randrange(20)
        lines = ["import itertools, time", "calls = itertools.count()"]
        lines += ["def compute_score(data_source, solution_str, ground_truth, extra_info=None):"]
        lines += [f"    if next(calls) == {hangs_at}:", "        time.sleep(3600)", "    return 0.5", ""]
        (folder / "reward.py").write_text("\n".join(lines))
        words = main_job(folder, "reward.timeout_s=1", f"reward.on_error={'count' if count else 'stop'}")
        code, said = run_command(words, folder)
        named = "compute_score \\(.*reward.py\\)"
        if not count:
            expect(said, f"error: reward function {named} failed on .*jsonl line \\d+", "reward.timeout_s=1")
        return check_end(count, code, expect(said, named))

    def tool(draw: Random, folder: Path) -> str:
        lines = ["import time", "from verl.tools.function_tool import function_tool"]
        for name in ("first", "second"):
            lines += ["@function_tool(timeout=0.5)", f"def {name}(x: int) -> str:", '    """Answer.', "", "    Args:"]
            lines += ["        x: a number", '    """', f"    if x == {draw.randrange(9) if name == 'first' else -1}:"]
            lines += ["        time.sleep(3600)", '    return "done"']
        (folder / "tools.py").write_text("\n".join(lines) + "\n")
        tools = load_tools(None, str(folder / "tools.py"))

        async def call_all() -> list[str]:
            calls = [call_tool(tools, name, json.dumps({"x": x}), {}) for name in tools for x in range(9)]
            return [str(response.text) for response, _, _ in await asyncio.gather(*calls)]

        with said_by_logs() as printed:
            answers = asyncio.run(call_all())
        said = "\n".join([printed.getvalue(), *answers])
        if sorted(set(answers)) != ["Error: first took longer than 0.5 seconds", "done"] or answers.count("done") != 17:
            raise Wrong(said)
        named = "tool first took longer than its timeout of 0.5 seconds with the arguments"
        return expect(said, named, never="tool second|Error: second")

    def inject(draw: Random) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return draw.choice([grader, tool])(draw, Path(folder))

    yield inject


@contextmanager
def full_disk() -> Iterator[Inject]:
    """The run's folder is on a disk that becomes full at some step: a mount of this process's own."""

    def inject(draw: Random) -> str:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            jobs.prepare(folder)
            (folder / "run").mkdir()
            size = draw.randrange(400, 4000)
            mount = f'mount -t tmpfs -o size={size}k none {folder}/run && "$@"; code=$?; ls -A {folder}/run; exit $code'
            unshare = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
            code, said = run_command([*main_job(folder), "trainer.total_training_steps=200"], folder, *unshare)
            said = f"{size} KiB\n{said}"
            full = "(?i)error: (.*\n)*.*(no room is left|no space left|could not be (saved|written))"
            return check_end(False, code, expect(said, full, never="tmp$"))

    yield inject
