"""Programs and functions in Python, run on the tests of the ground truth: the share of them that pass.

Every test is a run of its own in the sandbox, or on a SandboxFusion server, with one input; the verdict is taken here.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from verl.rewards.sandbox import Limits, ProgramResult, shared_sandbox
from verl.rewards.scorers.code_tests import CodeTest, read_tests
from verl.rewards.scorers.sandbox_fusion import run_on_server

ANSWER_S = 30.0  # processor seconds of all tests of one answer
WAITING = 1 / 3  # of a second on the clock counts at least: a busy machine may give a program no more
ASLEEP = 0.1  # share of the clock below which a program that runs longer than a second sleeps: the clock counts then
# A fenced block; a last one that is never closed reaches to the end.
_BLOCK = re.compile(r"```[ \t]*+(\w*+)[^\n`]*+\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = ("python", "py", "python3", "")


def extract_code(solution_str: str) -> str:
    """The last fenced block of Python (or of no named language); without one the whole text."""
    blocks = [code for language, code in _BLOCK.findall(solution_str) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else solution_str


def score_answer(
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
    memory_limit_mb: int | None = None,
    continuous: bool = True,
    limit_s: int = 10,
) -> dict[str, Any]:
    """{score, acc, pred, tests, passed, not_run}: the share of tests passed, without `continuous` 1 for all, else 0.

    `limit_s` are processor seconds of one test (three times that on the clock). SandboxError where no program could be
    run, ValueError where the ground truth has no tests that can be judged.
    """
    del extra_info
    code, tests = extract_code(solution_str), read_tests(ground_truth)
    given = Limits(cpu_s=limit_s, wall_s=3.0 * limit_s, memory_mb=memory_limit_mb or Limits.memory_mb)
    passed = not_run = 0
    for is_passed, result in run_tests(code, tests, given, sandbox_fusion_url, concurrent_semaphore):
        passed, not_run = passed + is_passed, not_run + (result is None)
    is_right = passed == len(tests)
    score = passed / len(tests) if continuous else float(is_right)
    return {
        "score": score, "acc": float(is_right), "pred": code.strip(), "tests": len(tests), "passed": passed,
        "not_run": not_run,
    }  # fmt: skip


def run_tests(
    code: str,
    tests: Sequence[CodeTest],
    given: Limits,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
) -> Iterator[tuple[bool, ProgramResult | None]]:
    """Whether each test passes, and what the program gave for it: None where ANSWER_S left no time."""
    used_s = 0.0
    for test in tests:
        if used_s >= ANSWER_S:
            yield False, None
            continue
        limits = dataclasses.replace(given, output_bytes=test.output_bytes)
        request = {"source": code} if test.call is None else {"source": code, "call": test.call}
        if sandbox_fusion_url:
            with concurrent_semaphore or contextlib.nullcontext():
                result = run_on_server(sandbox_fusion_url, request, test.stdin, limits)
        else:
            result = shared_sandbox().run(request, test.stdin, limits)
        used_s += seconds_that_count(result, limits)
        yield result.is_success and test.accepts(result.stdout), result


def seconds_that_count(result: ProgramResult, limits: Limits) -> float:
    """Seconds that count against ANSWER_S: processor time, or the clock where a program sleeps or passed its limit."""
    if result.ending == "wall":
        return limits.wall_s
    is_asleep = result.wall_s > 1.0 and result.cpu_s < ASLEEP * result.wall_s
    return result.wall_s if is_asleep else max(result.cpu_s, WAITING * result.wall_s)
