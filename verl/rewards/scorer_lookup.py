"""The built-in scorers by `data_source`."""

from collections.abc import Callable, Mapping
from typing import Any

from verl.rewards.base import NoScorerError
from verl.rewards.scorers import gsm8k
from verl.utils.suggest import closest

Scorer = Callable[..., dict[str, Any]]

SCORERS: dict[str, Scorer] = {"openai/gsm8k": gsm8k.score_answer}

# Data sources whose scorer is still to come; a name that ends in * is a prefix.
PLANNED_SCORERS = {
    "math_reward": ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"),
    "math_dapo": ("math_dapo", "math", "math_dapo_reasoning", "aime*"),
    "prime_math": (
        "numina_aops_forum",
        "numina_synthetic_math",
        "numina_amc_aime",
        "numina_synthetic_amc",
        "numina_cn_k12",
        "numina_olympiads",
    ),
    "code execution (sandbox_fusion, prime_code)": ("codecontests", "apps", "codeforces", "taco"),
    "geo3k": ("hiyouga/geometry3k",),
    "search_r1_like_qa_em": (
        "searchR1_nq",
        "searchR1_triviaqa",
        "searchR1_popqa",
        "searchR1_hotpotqa",
        "searchR1_2wikimultihopqa",
        "searchR1_musique",
        "searchR1_bamboogle",
    ),
}


def score_row(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, Any]:
    """The built-in score {score, acc, pred}; NoScorerError when no scorer exists for the data source."""
    return find_scorer(data_source)(solution_str, ground_truth, **kwargs)


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> float:
    """The built-in score of an answer, for reward functions that build on it.

    The three sandbox arguments are for code scorers, which are still to come.
    """
    return float(score_row(data_source, solution_str, ground_truth, extra_info, **kwargs)["score"])


def find_scorer(data_source: str) -> Scorer:
    """The scorer of a data source; NoScorerError lists the built-in ones."""
    if data_source in SCORERS:
        return SCORERS[data_source]
    known = ", ".join(sorted(SCORERS))
    advice = "set reward.custom_reward_function.path to a function of your own"
    for scorer_name, sources in PLANNED_SCORERS.items():
        if any(_matches(data_source, source) for source in sources):
            raise NoScorerError(
                f"data_source {data_source!r}: its scorer {scorer_name} is still to come; built in so far: {known}. "
                f"Until then {advice}"
            )
    near = closest(data_source, SCORERS)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise NoScorerError(f"no reward is known for data_source {data_source!r}{hint}; built in: {known}. Else {advice}")


def _matches(data_source: str, pattern: str) -> bool:
    return data_source.startswith(pattern[:-1]) if pattern.endswith("*") else data_source == pattern
