r"""DAPO's mathematical answers: `Answer: X` near the end, or a box where asked for; +1 or -1 (docs/rewards/scorers.md).

Source of the format and of the scores: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025).
"""

import re
from typing import Any

from verl.rewards.scorers.answer_score import answer_score
from verl.rewards.scorers.math_answer import last_boxed

TAIL = 300  # characters of the end in which the answer must begin
BOX_TAIL = 100  # the same for a box alone
ANSWER = r"(?i)\banswer\W{0,8}:[*\s]{0,8}([^\n]*)"


def extract_answer(solution_str: str, strict_box_verify: bool = False) -> str | None:
    r"""The rest of the line behind the last `Answer:` in the last 300 characters; strictly, the box there."""
    tail = solution_str[-TAIL:]
    if strict_box_verify:
        start = max(tail.rfind(r"\boxed"), tail.rfind(r"\fbox"))
        return last_boxed(tail[start:]) if start >= 0 else None
    found = re.findall(ANSWER, tail)
    return found[-1].strip() or None if found else None


def score_answer(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """{score: 1 or -1, acc, pred, undecided}. A list `pause_tokens_index`: nothing that is more than 100 characters
    before its last place counts."""
    if pause_tokens_index:
        solution_str = solution_str[max(pause_tokens_index[-1] - BOX_TAIL, 0) :]
    return answer_score(extract_answer(solution_str, strict_box_verify), ground_truth, wrong=-1.0)


compute_score = score_answer


def is_correct_minerva(
    solution_str: str, gt: str, gt_need_extract: bool = False, answer_pattern: str = ANSWER
) -> tuple[bool, str]:
    """(right, the normal form of what `answer_pattern` captures last). `gt_need_extract`: `gt` is a text with a box."""
    found = re.findall(answer_pattern, solution_str)
    verdict = answer_score(found[-1] if found else None, (last_boxed(gt) or "") if gt_need_extract else gt)
    return bool(verdict["acc"]), verdict["pred"] or "[INVALID]"


def is_correct_strict_box(pred: str, gt: str, pause_tokens_index: Any = None) -> tuple[int, str | None]:
    """(1 or -1, the content of the box), in the last 100 characters, or in those from 100 before the last pause on."""
    text = pred if pause_tokens_index else pred[-BOX_TAIL:]
    verdict = score_answer(text, gt, True, pause_tokens_index)
    return int(verdict["score"]), verdict["pred"] or None


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> tuple[bool, str | None]:
    """(right, what was read) by `is_correct_strict_box` or `is_correct_minerva`."""
    if not strict_box_verify:
        return is_correct_minerva(solution_str, answer)
    verdict, content = is_correct_strict_box(solution_str, answer, pause_tokens_index)
    return verdict == 1, content
