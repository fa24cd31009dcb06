"""Import path for outside code to the results of a program test by test, in the sandbox of this machine."""

from typing import Any

from verl.rewards.scorers import code_cases


def check_correctness(in_outs: Any, generation: str, timeout: float = 10, debug: bool = True) -> code_cases.Outcomes:
    """(results, metadata) of each test; `debug` has no effect."""
    return code_cases.check_correctness(None, in_outs, generation, timeout)
