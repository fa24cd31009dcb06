"""Programs test by test, with the signatures of published code: for it alone."""

import json
from contextlib import AbstractContextManager
from typing import Any

from verl.rewards.sandbox import Limits, ProgramResult
from verl.rewards.scorers.code import extract_code, run_tests
from verl.rewards.scorers.code_tests import read_tests

FIRST = 10  # tests that run alone with `continuous`
RESULTS: dict[str, bool | int] = {"success": True, "wrong_answer": False, "runtime_error": -2, "timeout": -3}
Outcomes = tuple[list[bool | int], list[dict[str, Any]]]


def check_correctness(
    sandbox_fusion_url: str | None,
    in_outs: Any,
    generation: str,
    timeout: float,
    memory_limit_mb: int | None = 1024,
    language: str = "python",
    concurrent_semaphore: AbstractContextManager[Any] | None = None,
) -> Outcomes:
    """(results, metadata) of each test: True or False for its output, -2 for a program that failed, -3 for one that a
    limit of `timeout` processor seconds ended. Without an address it runs in the sandbox of this machine."""
    if language != "python":
        raise ValueError(f"language={language!r}: programs are in python here")
    limits = Limits(cpu_s=timeout, wall_s=3.0 * timeout, memory_mb=memory_limit_mb or Limits.memory_mb)
    found = run_tests(generation, read_tests(in_outs), limits, sandbox_fusion_url, concurrent_semaphore)
    metadata = [{"case_index": number, **_known(*one)} for number, one in enumerate(found)]
    return [RESULTS[one["status"]] for one in metadata], metadata


def _known(is_passed: bool, result: ProgramResult | None) -> dict[str, Any]:
    if result is None:
        return {"status": "timeout"}
    failed = "timeout" if result.ending in ("cpu", "wall") else "runtime_error"
    texts = {name: getattr(result, name).decode(errors="replace") for name in ("stdout", "stderr")}
    status = "success" if is_passed else "wrong_answer" if result.is_success else failed
    return {"status": status, "exit_code": result.exit_code, **texts}


def score_on_server(
    sandbox_fusion_url: str | None,
    concurrent_semaphore: AbstractContextManager[Any] | None,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: Any,
    continuous: bool = False,
    timeout: float = 10,
) -> tuple[float, list[dict[str, Any]]]:
    """(share of the tests that pass, what is known of each), with `continuous` of the first ten; 0 without a block."""
    if "```" not in completion:
        return 0.0, [{"error": "Invalid completion (missing code block)"}]
    cases = json.loads(test_cases) if isinstance(test_cases, str) else test_cases
    if continuous:
        lists = ("inputs", "outputs", "assert_case")
        cases = {name: value[:FIRST] if name in lists and value is not None else value for name, value in cases.items()}
    program, place = extract_code(completion), (memory_limit_mb, "python", concurrent_semaphore)
    results, metadata = check_correctness(sandbox_fusion_url, cases, program, timeout, *place)
    return results.count(True) / len(results), metadata


def score_here(completion: str, test_cases: Any, continuous: bool = False) -> tuple[float, list[dict[str, Any]]]:
    """(1 where all tests pass, else 0; what is known of each), in the sandbox of this machine; `continuous`: the share
    of the first ten."""
    share, metadata = score_on_server(None, None, None, f"```\n{extract_code(completion)}\n```", test_cases, continuous)
    return (share if continuous else float(share == 1)), metadata
