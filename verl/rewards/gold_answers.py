"""Gold answers as text: what is known to be right of a row, in the forms that scorers read."""

import json
from collections.abc import Mapping
from typing import Any

from verl.rewards.scorers.math_answer import last_boxed

SOLUTION_COLUMNS = ("solution", "answer")  # of extra_info, else of the row: the worked answer, as text
FORMS = ("#### {}", r"\boxed{{{}}}", "Answer: {}", "<answer>{}</answer>", "{}")  # that scorers read


def worked_answer(*places: Mapping[str, Any]) -> str | None:
    """The first text in one of SOLUTION_COLUMNS; None without one."""
    texts = [place.get(column) for place in places for column in SOLUTION_COLUMNS]
    return next((text for text in texts if isinstance(text, str) and text.strip()), None)


def final_answer(text: str) -> str:
    """The end of a worked answer: the line behind the last `####`, else the last box, else the text itself."""
    _, mark, rest = text.rpartition("####")
    return (rest.strip().splitlines() or [""])[0] if mark else last_boxed(text) or text


def gold_texts(ground_truth: Any) -> list[str]:
    """The gold answers as text: of a text, a number, a list of these, or {target: ...}; none of tests of a program."""
    if isinstance(ground_truth, dict):
        return gold_texts(ground_truth.get("target")) if "target" in ground_truth else []
    if isinstance(ground_truth, list):
        return [text for item in ground_truth for text in gold_texts(item)]
    if isinstance(ground_truth, bool) or not isinstance(ground_truth, str | int | float):
        return []
    text = final_answer(str(ground_truth)).strip()
    return [text] if text and not (text.startswith("{") and is_json(text)) else []


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
