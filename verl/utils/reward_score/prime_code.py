"""Import path for outside code to the scorer of programs, which runs them in the sandbox of this machine."""

from typing import Any

from verl.rewards.scorer_lookup import default_compute_score

__all__ = ["compute_score"]


def compute_score(solution_str: str, ground_truth: Any, extra_info: Any = None, **kwargs: Any) -> Any:
    """The score of a program against the tests of `ground_truth`."""
    return default_compute_score("codecontests", solution_str, ground_truth, extra_info, **kwargs)
