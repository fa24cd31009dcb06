"""Scores a sum: 1 if the last number of the answer is the right one, else 0."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The reward function's usual signature."""
    numbers = re.findall(r"[0-9]+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)
