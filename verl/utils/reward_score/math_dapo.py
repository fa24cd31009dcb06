"""Import path for outside code to the DAPO scorer of mathematical answers."""

from verl.rewards.scorers.math_dapo import compute_score, is_correct_minerva, is_correct_strict_box, verify
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from verl.utils.reward_score.math_reward import strip_string as normalize_final_answer

__all__ = [
    "compute_score", "is_correct_minerva", "is_correct_strict_box", "last_boxed_only_string", "normalize_final_answer",
    "remove_boxed", "verify",
]  # fmt: skip
