"""The columns that every mathematical scorer returns."""

from typing import Any

from verl.rewards.gold_answers import final_answer
from verl.rewards.scorers.math_answer import normal_form
from verl.rewards.scorers.math_equality import is_equal


def answer_score(pred: str | None, gold: object, right: float = 1.0, wrong: float = 0.0) -> dict[str, Any]:
    """{score, acc, pred, undecided} of the extracted answer; None (there is none) is wrong.

    `undecided` is 1 where the symbolic comparison was killed: the answer was not shown to be right, so it counts as
    wrong. Of a ground truth that is a whole solution its final answer counts. ValueError where the ground truth is
    empty, because then no answer can be scored.
    """
    text = final_answer(str(gold))
    if not text.strip():
        raise ValueError(f"the ground truth {gold!r} of a mathematical answer is empty")
    equal = False if pred is None else is_equal(text, pred)
    return {
        "score": right if equal else wrong,
        "acc": float(bool(equal)),
        "pred": "" if pred is None else normal_form(pred).text,  # one spelling, for the majority vote
        "undecided": float(equal is None),
    }
