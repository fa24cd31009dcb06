r"""Numina answers: the last box, else what follows the last "answer is", else the last formula or number."""

import re
from typing import Any

from verl.rewards.scorers.answer_score import answer_score
from verl.rewards.scorers.math_answer import last_boxed

_SAID = re.compile(r"\banswer(?: is|\s{0,3}[:=])\s{0,3}:?\s{0,3}([^\n]{1,400})", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_FORMULA = re.compile(r"\$([^$\n]{1,400})\$")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?", re.ASCII)


def extract_answer(solution_str: str) -> str | None:
    """The answer as the solution writes it; None where it has no box, no such sentence, no formula and no number."""
    if r"\boxed" in solution_str or r"\fbox" in solution_str:
        return last_boxed(solution_str)
    if said := _SAID.findall(solution_str):
        return _SENTENCE_END.split(said[-1])[0].strip() or None
    tail = solution_str[-2000:]
    found = _FORMULA.findall(tail) or _NUMBER.findall(tail)
    return found[-1] if found else None


def score_answer(solution_str: str, ground_truth: str) -> dict[str, Any]:
    """{score: 1 or 0, acc, pred, undecided}."""
    return answer_score(extract_answer(solution_str), ground_truth)


def compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str | None]:
    """(right, whether the answer is in a box, the answer as it is written)."""
    pred = extract_answer(model_output)
    return bool(answer_score(pred, ground_truth)["acc"]), last_boxed(model_output) is not None, pred
