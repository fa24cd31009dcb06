"""Answers as texts: what an answer ends with is the ground truth, but for spaces (docs/rewards/scorers.md)."""

from typing import Any

from verl.rewards.gold_answers import final_answer
from verl.rewards.scorers.search_r1_like_qa_em import extract_answer


def read_answer(text: str) -> str:
    """The text in the last `<answer>`, behind the last `####` or in the last box, else all but the thought."""
    said = text.rpartition("</think>")[2]
    return " ".join((extract_answer(said) or final_answer(said)).split())


def score_answer(solution_str: str, ground_truth: Any) -> dict[str, Any]:
    """{score: 1 or 0, acc, pred}; of a list of ground truths each is right. ValueError for none, or an object."""
    golds = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    texts = [read_answer(str(gold)) for gold in golds if not isinstance(gold, dict | list)]
    if len(texts) < len(golds) or not all(texts) or not texts:
        raise ValueError(f"the ground truth {ground_truth!r:.200} is no text; expected one, or a list of texts")
    pred = read_answer(solution_str)
    score = float(pred in texts)
    return {"score": score, "acc": score, "pred": pred}
