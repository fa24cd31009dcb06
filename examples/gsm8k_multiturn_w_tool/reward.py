"""One point for the right final answer, nothing for anything else: using the tool is not rewarded as such.

`tool` is 1 when a call was carried out and gave a number; text could imitate that, the number of turns cannot.
"""

import re

FINAL = re.compile(r"####\s*(-?\d+)")
NUMBER = re.compile(r"<tool_response>\s*-?[\d.]+\s*</tool_response>")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The reward function's usual signature. `solution_str`: all turns after the question, tool replies included."""
    said = FINAL.fullmatch(solution_str.rpartition("</tool_response>")[2].strip())
    right = float(said is not None and said.group(1) == ground_truth)
    called = (extra_info or {}).get("num_turns", 2) >= 4 and NUMBER.search(solution_str) is not None
    return {"score": right, "acc": right, "tool": float(called)}
