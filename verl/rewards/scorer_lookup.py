"""The built-in scorers by `data_source`. docs/rewards/scorers.md has the rule of each."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from verl.config.reward import SCORERS
from verl.rewards.base import NoScorerError
from verl.rewards.scorers.equivalence_pool import check_math_is_installed
from verl.utils.suggest import closest, did_you_mean

Scorer = Callable[..., dict[str, Any]]

# Modules of verl.rewards.scorers, and their data sources; a name that ends in * is a prefix.
SOURCES = {
    "gsm8k": ("openai/gsm8k",),
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
    "code": ("codecontests", "apps", "codeforces", "taco"),
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
NAMED = {"math": "math_reward"}  # values of reward.scorer that are no module
MATHEMATICAL = ("math_reward", "math_dapo", "prime_math", "geo3k")  # need the extra `math`
RETURNS_DICT = ("math_dapo",)  # what published reward functions expect of default_compute_score


def score_row(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    scorer: str | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """The built-in score {score, acc, pred} by `scorer`, else by that of the data source; NoScorerError without one.

    The three sandbox arguments are for scorers of code.
    """
    if (scorer or _module_of(data_source)) == "code":
        kwargs |= {
            "extra_info": extra_info,
            "sandbox_fusion_url": sandbox_fusion_url,
            "concurrent_semaphore": concurrent_semaphore,
            "memory_limit_mb": memory_limit_mb,
        }
    return find_scorer(data_source, scorer)(solution_str, ground_truth, **kwargs)


def default_compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> float | dict[str, Any]:
    """The built-in score of an answer, for reward functions that build on it: a number, of math_dapo a dict.

    `kwargs` are those of the scorer, and of scorers of code `sandbox_fusion_url`, `concurrent_semaphore` and
    `memory_limit_mb`.
    """
    result = score_row(data_source, solution_str, ground_truth, extra_info, **kwargs)
    return result if _module_of(data_source) in RETURNS_DICT else float(result["score"])


def find_scorer(data_source: str, scorer: str | None = None) -> Scorer:
    """The scorer of reward.scorer, else of a data source. NoScorerError lists the built-in ones, ConfigError
    names a missing extra."""
    if scorer and scorer not in SCORERS:
        raise NoScorerError(f"no built-in scorer is named {scorer!r}; {did_you_mean(scorer, SCORERS)}")
    name = NAMED.get(scorer, scorer) if scorer else _module_of(data_source)
    if name is not None:
        if name in MATHEMATICAL:
            check_math_is_installed()
        return importlib.import_module(f"verl.rewards.scorers.{name}").score_answer
    known = [source for sources in SOURCES.values() for source in sources]
    near = closest(data_source, known)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise NoScorerError(
        f"no reward is known for data_source {data_source!r}{hint}; built in: {', '.join(sorted(known))}. Else set "
        "reward.scorer to math, gsm8k, exact or another built-in scorer of any row, or "
        "reward.custom_reward_function.path to a function of your own"
    )


def _module_of(data_source: str) -> str | None:
    return next((name for name, sources in SOURCES.items() if any(_matches(data_source, s) for s in sources)), None)


def _matches(data_source: str, pattern: str) -> bool:
    return data_source.startswith(pattern[:-1]) if pattern.endswith("*") else data_source == pattern
