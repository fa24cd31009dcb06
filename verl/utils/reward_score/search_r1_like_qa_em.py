"""Import path for outside code to the scorer of answers found by search."""

from verl.rewards.scorers.search_r1_like_qa_em import *
from verl.rewards.scorers.search_r1_like_qa_em import extract_answer as extract_solution
