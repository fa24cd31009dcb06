r"""DAPO's mathematical answers: `Answer: X` near the end, or a box where asked for; +1 or -1 (docs/scorers.md).

Source of the format and of the scores: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025).
"""

import re
from typing import Any

from verl.rewards.scorers.answer_score import answer_score
from verl.rewards.scorers.math_answer import last_boxed

TAIL = 300  # characters of the end in which the answer must begin
_ANSWER = re.compile(r"\banswer\W{0,8}:[*\s]{0,8}([^\n]*)", re.IGNORECASE)


def extract_answer(solution_str: str, strict_box_verify: bool = False) -> str | None:
    r"""What follows the last `Answer:` of the last 300 characters on its line; strictly, the box that begins there."""
    tail = solution_str[-TAIL:]
    if strict_box_verify:
        start = max(tail.rfind(r"\boxed"), tail.rfind(r"\fbox"))
        return last_boxed(tail[start:]) if start >= 0 else None
    found = _ANSWER.findall(tail)
    return found[-1].strip() or None if found else None


def score_answer(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> dict[str, Any]:
    """{score: 1 or -1, acc, pred, undecided}."""
    return answer_score(extract_answer(solution_str, strict_box_verify), ground_truth, wrong=-1.0)


compute_score = score_answer
