"""Import path for outside code to the GSM8K scorer."""

import re

from verl.rewards.scorers.gsm8k import METHODS, compute_score, extract_answer

__all__ = ["compute_score", "extract_answer", "extract_solution"]


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The number after the last `####` of the last 300 characters (flexible: their last number) as it is written, but
    without commas and `$`; None without one."""
    if method not in METHODS:
        raise ValueError(f"gsm8k method {method!r}; allowed: {', '.join(METHODS)}")
    before = r"####\s*" if method == "strict" else r"(?<![\d.,])"
    found = re.findall(before + r"((?:(?<!\w)-)?\$?-?[\d.,]*\d)", solution_str[-300:])
    return re.sub("[,$]", "", found[-1]) if found else None
