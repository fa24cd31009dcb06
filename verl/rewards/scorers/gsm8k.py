"""GSM8K answers: the number after `####` (strict) or the last number anywhere (flexible), compared as numbers."""

import re
from decimal import Decimal, InvalidOperation

from verl.rewards.scorers.math_answer import FULL_WIDTH

METHODS = ("strict", "flexible")

_NUMBER = r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
# `#### **-$1,234.50**.` or `#### \boxed{18}`: a few marks before the number are allowed, words are not. (The limits
# prevent quadratic backtracking over a long run of marks.) `#### 18/20` and `#### 3 + 4` are no numbers.
_MARKED = re.compile(
    r"####[ \t*$€£]{0,8}(?:\\boxed\{[ $]{0,3})?(?P<sign>[-\u2212]?)[ $€£]{0,3}"
    + _NUMBER
    + r"(?P<more>[eE][-+]?\d|\.\d|[ \t]?[-+*/^:=\u2212\u00d7\u00f7][ \t]?[-\u2212$]?\d)?"
)
# A minus after a digit or letter is an operator or a hyphen, not a sign.
_ANYWHERE = re.compile(r"(?<![\w.])(?:(?<![\w)])(?P<sign>[-\u2212]))?[$€£]?" + _NUMBER)


def extract_answer(solution: str, method: str = "strict") -> str | None:
    """The answer's number as plain text ("1234.5"), or None when there is none.

    Strict reads the last number that follows a `####`; flexible reads the last number of the text.
    """
    if method not in METHODS:
        raise ValueError(f"gsm8k method {method!r}; allowed: {', '.join(METHODS)}")
    pattern = _MARKED if method == "strict" else _ANYWHERE
    matches = list(pattern.finditer(solution.translate(FULL_WIDTH)))
    if not matches or matches[-1].groupdict().get("more"):
        return None
    match = matches[-1]
    number = to_number((match["sign"] or "") + match["number"])
    if number is None:
        return None
    text = f"{number:f}"  # normalize() would round to the 28 digits of the decimal context
    return text.rstrip("0").rstrip(".") if "." in text else text


def to_number(text: str) -> Decimal | None:
    """The value of a written number; thousands commas, currency signs, percent and a trailing dot are ignored."""
    cleaned = text.strip().translate(FULL_WIDTH).replace("\u2212", "-").lstrip("$€£ ").rstrip("%. ")
    negative = cleaned.startswith("-")
    cleaned = cleaned.removeprefix("-").lstrip("$€£ ").replace(",", "")
    try:
        value = Decimal(cleaned)
    except InvalidOperation:
        return None
    if not value.is_finite():
        return None
    return value.copy_negate() if negative else value


def gold_number(ground_truth: object) -> Decimal | None:
    """The number that a ground truth is, or that the worked answer in it ends with."""
    text = str(ground_truth)
    return to_number((extract_answer(text) or "") if "####" in text else text)


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right number, `format_score` for a wrong one, 0 for none.

    ValueError when the ground truth is not a number, because then no answer can be scored.
    """
    expected = gold_number(ground_truth)
    if expected is None:
        raise ValueError(f"the gsm8k ground truth {ground_truth!r} is not a number")
    answer = extract_answer(solution_str, method)
    if answer is None:
        return 0.0
    return score if Decimal(answer) == expected else format_score


def score_answer(
    solution_str: str, ground_truth: str, method: str = "strict", **kwargs: float
) -> dict[str, float | str]:
    """`compute_score`, and for validation `acc` and the extracted `pred` ("" for none)."""
    value = compute_score(solution_str, ground_truth, method, **kwargs)
    pred = extract_answer(solution_str, method)
    correct = pred is not None and Decimal(pred) == gold_number(ground_truth)
    return {"score": value, "acc": float(correct), "pred": pred or ""}
