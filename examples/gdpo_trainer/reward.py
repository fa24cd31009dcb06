"""A reward of two parts for GSM8K: the right answer, and an answer in the form that was asked for."""

import re

from verl.utils.reward_score.gsm8k import compute_score as gsm8k_score


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> dict:
    """`accuracy` and `format` are 0 or 1; `score` is their mean, `acc` is what validation reports."""
    accuracy = float(gsm8k_score(solution_str, ground_truth, method="flexible"))
    is_in_form = float(re.search(r"#### -?[\d.,]+\s*$", solution_str) is not None)
    return {"score": (accuracy + is_in_form) / 2, "acc": accuracy, "accuracy": accuracy, "format": is_in_form}
