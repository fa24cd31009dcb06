"""Answers to questions by search: the last `<answer>...</answer>` equals one of the targets, as SQuAD compares.

Source of the normal form: Rajpurkar et al., "SQuAD: 100,000+ Questions for Machine Comprehension of Text" (2016).
"""

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, English articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def extract_answer(solution_str: str) -> str | None:
    """The text of the last complete `<answer>...</answer>`; None without one."""
    end = solution_str.rfind("</answer>")
    start = solution_str.rfind("<answer>", 0, end) if end >= 0 else -1
    return solution_str[start + len("<answer>") : end].strip() if start >= 0 else None


def read_targets(ground_truth: Any) -> list[str]:
    """The right answers of `{"target": [...]}`, a list or one text; ValueError where there is none."""
    found = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if isinstance(found, str):
        targets = [found]
    else:
        targets = [str(target) for target in found] if isinstance(found, Iterable) else []
    if not any(map(normalize_answer, targets)):
        raise ValueError(
            f"the ground truth {ground_truth!r:.200} has no target; expected {{'target': ['one answer', 'another']}}"
        )
    return targets


def em_check(prediction: str, golden_answers: Any) -> int:
    """1 where the prediction equals one of the answers in normal form, else 0."""
    return int(normalize_answer(prediction) in _normal_targets(golden_answers))


def subem_check(prediction: str, golden_answers: Any) -> int:
    """1 where one of the answers is in the prediction, both in normal form, else 0."""
    return int(any(target in normalize_answer(prediction) for target in _normal_targets(golden_answers)))


def _normal_targets(golden_answers: Any) -> set[str]:
    return set(map(normalize_answer, read_targets(golden_answers))) - {""}


def score_answer(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> dict[str, Any]:
    """{score, acc, pred}: `score` for a right answer, `format_score` for a wrong one, 0 for none."""
    if method != "strict":
        raise ValueError(f"search_r1_like_qa_em method {method!r}; allowed: strict")
    right, answer = _normal_targets(ground_truth), extract_answer(solution_str)
    correct = answer is not None and normalize_answer(answer) in right
    value = 0.0 if answer is None else score if correct else format_score
    return {"score": value, "acc": float(correct), "pred": answer or ""}


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for a right answer, `format_score` for a wrong one, 0 for none."""
    return score_answer(solution_str, ground_truth, method, format_score, score)["score"]


def compute_score_subem(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for an answer that contains a right one, `format_score` for another, 0 for none."""
    answer, value = extract_answer(solution_str), score_answer(solution_str, ground_truth, method, format_score, score)
    return score if answer is not None and subem_check(answer, ground_truth) else value["score"]
