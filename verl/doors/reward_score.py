"""Functions beside the built-in scorers, by the names that published reward functions import.

Nothing inside calls them: each says what `verl.rewards.scorers` does in the words of another signature.
"""

import re
from collections.abc import Sequence
from typing import Any

from verl.rewards.scorers import code_cases, prime_math
from verl.rewards.scorers.gsm8k import METHODS
from verl.rewards.scorers.math_answer import last_boxed, normal_form
from verl.rewards.scorers.math_equality import is_equal
from verl.rewards.scorers.math_reward import compute_score


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """The number after the last `####` of the last 300 characters (flexible: their last number) as it is written, but
    without commas and `$`; None without one."""
    if method not in METHODS:
        raise ValueError(f"gsm8k method {method!r}; allowed: {', '.join(METHODS)}")
    before = r"####\s*" if method == "strict" else r"(?<![\d.,])"
    found = re.findall(before + r"((?:(?<!\w)-)?\$?-?[\d.,]*\d)", solution_str[-300:])
    return re.sub("[,$]", "", found[-1]) if found else None


def compute_score_batched(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[str],
    extra_infos: Sequence[Any] | None = None,
) -> list[float]:
    """One score per answer; the data sources and extra_infos are not used."""
    del data_sources, extra_infos
    return [compute_score(*pair) for pair in zip(solution_strs, ground_truths, strict=True)]


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` or `\fbox{...}` with its command, as `\boxed{...}`; None without one."""
    content = last_boxed(string)
    return None if content is None else rf"\boxed{{{content}}}"


def remove_boxed(s: str) -> str:
    r"""The content of a text that is one `\boxed{...}`; ValueError for another text."""
    content = last_boxed(s) if s.startswith((r"\boxed", r"\fbox")) else None
    if content is None:
        raise ValueError(rf"{s!r:.80} is no \boxed{{...}}; last_boxed_only_string returns one")
    return content


def strip_string(string: str) -> str:
    """The normal form of an answer."""
    return normal_form(string).text


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are equal; two that are None are, one is not."""
    del verbose
    if str1 is None or str2 is None:
        return str1 is str2
    return bool(is_equal(str1, str2))


def compute_score_by_symbols(
    model_output: str, ground_truth: str, timeout_score: float = 0, timeout: float = 30.0
) -> float:
    """1 for the right answer, 0 for a wrong one, `timeout_score` where the comparison was killed. It has a limit of its
    own, whatever `timeout` says."""
    del timeout
    verdict = prime_math.score_answer(model_output, ground_truth)
    return timeout_score if verdict["undecided"] else verdict["score"]


def check_correctness_here(
    in_outs: Any, generation: str, timeout: float = 10, debug: bool = True
) -> code_cases.Outcomes:
    """(results, metadata) of each test; `debug` has no effect."""
    return code_cases.check_correctness(None, in_outs, generation, timeout)
