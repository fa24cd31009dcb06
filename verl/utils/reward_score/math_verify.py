"""Import path for outside code: an answer anywhere in the solution, compared by symbols."""

from verl.doors.reward_score import compute_score_by_symbols as compute_score
