"""Import path for outside code to the built-in scorers; the code is in verl.rewards."""

from verl.rewards.scorer_lookup import default_compute_score
from verl.utils.import_paths import refuse_missing_names
from verl.utils.reward_score import (
    geo3k,
    gsm8k,
    math_dapo,
    math_reward,
    prime_code,
    prime_math,
    sandbox_fusion,
    search_r1_like_qa_em,
)

__getattr__ = refuse_missing_names(__name__)
