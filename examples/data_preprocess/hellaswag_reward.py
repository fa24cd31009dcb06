"""The reward of hellaswag.py's rows: 1 for the right letter after the last `####`, else 0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """{score, acc, pred}; `pred` is the letter, or "" where there is none."""
    found = re.findall(r"####\s*\(?([A-Da-d])\b", solution_str)
    pred = found[-1].upper() if found else ""
    right = float(pred == ground_truth)
    return {"score": right, "acc": right, "pred": pred}
