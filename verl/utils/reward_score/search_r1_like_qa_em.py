"""Import path for outside code to the scorer of answers found by search."""

from verl.rewards.scorers.search_r1_like_qa_em import (
    compute_score,
    compute_score_subem,
    em_check,
    normalize_answer,
    subem_check,
)
from verl.rewards.scorers.search_r1_like_qa_em import extract_answer as extract_solution

__all__ = ["compute_score", "compute_score_subem", "em_check", "extract_solution", "normalize_answer", "subem_check"]
