"""One point for the right final answer, nothing else: a tool call itself is not rewarded.

`tool` is 1 if a call was executed and gave a number. Text could imitate a reply but not the number of turns.
"""

import re

FINAL = re.compile(r"####\s*(-?\d+)")
NUMBER = re.compile(r"<tool_response>\s*-?[\d.]+\s*</tool_response>")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """The reward function's usual signature. `solution_str`: all turns after the question, tool replies included."""
    final = FINAL.fullmatch(solution_str.rpartition("</tool_response>")[2].strip())
    right = float(final is not None and final.group(1) == ground_truth)
    called = (extra_info or {}).get("num_turns", 2) >= 4 and NUMBER.search(solution_str) is not None
    return {"score": right, "acc": right, "tool": float(called)}
