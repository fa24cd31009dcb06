"""The dispatch by data source, and the import paths at which the outside world finds the scorers."""

import importlib
import sys
from types import ModuleType

import pytest

from tests.conftest import import_or_skip
from verl.config.reward import SCORERS
from verl.rewards.base import NoScorerError
from verl.rewards.scorer_lookup import SOURCES, find_scorer, score_row
from verl.utils.errors import VerlError
from verl.utils.reward_score import default_compute_score, gsm8k

RIGHT = {  # one data source of each scorer, a right answer, a wrong one, the ground truth
    "openai/gsm8k": ("#### 4", "#### 5", "4"),
    "lighteval/MATH": (r"\boxed{\frac12}", r"\boxed{2}", r"\frac{1}{2}"),
    "DigitalLearningGmbH/MATH-lighteval": (r"\boxed{x+1}", r"\boxed{x}", "1+x"),
    "HuggingFaceH4/MATH-500": (r"\boxed{4}", "4", "4"),
    "math_dapo": ("Answer: 4", "Answer: 5", "4"),
    "math": ("Answer: 4", r"\boxed{4}", "4"),
    "math_dapo_reasoning": ("Answer: $4$", "4", "4"),
    "aime2024": ("Answer: 204", "Answer: 205", "204"),
    "aime": ("Answer: 33", "Answer: 34", "033"),
    "numina_olympiads": ("The answer is 4.", "The answer is 5.", "4"),
    "numina_cn_k12": (r"\boxed{4}", r"4, so \boxed{5}", "4"),
    "hiyouga/geometry3k": (r"<think>so</think> \boxed{4}", r"\boxed{5}", "4"),
    "searchR1_nq": ("<answer>the Half</answer>", "half", {"target": ["half"]}),
}


@pytest.fixture(autouse=True, scope="module")
def _math_verify():
    import_or_skip("math_verify")


@pytest.mark.parametrize("source", RIGHT)
def test_every_data_source_has_its_scorer(source):
    right, wrong, truth = RIGHT[source]
    best, worst = (score_row(source, answer, truth, {"index": 1}) for answer in (right, wrong))
    assert (best["acc"], best["score"]) == (1.0, 1.0)
    assert worst["acc"] == 0.0 and worst["score"] < 0.1
    assert best.keys() == worst.keys() and {"score", "acc", "pred"} <= best.keys()


@pytest.mark.parametrize(
    ("scorer", "right", "wrong", "truth"),
    [
        ("math", r"\boxed{\frac12}", "0.5", "0.5"),
        ("math", r"so \boxed{18}", r"\boxed{9}", "9 + 9 = <<9+9=18>>18\n#### 18"),
        ("prime_math", "It is 4.", "It is 5.", r"Since $2+2=4$, the answer is $\boxed{4}$."),
        ("gsm8k", "#### 1,234", "#### 1", "It is 617 + 617.\n#### 1,234"),
        ("exact", "Paris", "paris", "Paris"),
        ("exact", "<think>Rome #### Rome</think>\n New  York\n", "Rome", "New York"),
        ("exact", "So\n#### B", "#### B\n#### A", "B"),
        ("exact", r"it is \boxed{B}", "A B", ["A", "B"]),
        ("exact", "<answer> 18 </answer>", "18 or 19", "sum: <<9+9=18>>18\n#### 18"),
        ("exact", "3", "4", 3),
        ("math_reward", r"\boxed{4}", "4", "4"),
    ],
)
def test_a_scorer_by_name_scores_rows_of_any_source(scorer, right, wrong, truth):
    scores = [score_row("train", answer, truth, {}, scorer=scorer)["score"] for answer in (right, wrong)]
    assert scores == [1.0, 0.0]
    assert default_compute_score("openai/gsm8k", right, truth, scorer=scorer) == 1.0


def test_names_of_scorers_are_those_of_the_configuration():
    assert {getattr(find_scorer("x", name), "__name__", "") for name in SCORERS} == {"score_answer"}
    modules = {module for module in SOURCES if module not in SCORERS}
    assert modules == set()
    with pytest.raises(NoScorerError, match="no built-in scorer is named 'gsm8'; did you mean 'gsm8k'"):
        find_scorer("x", "gsm8")


@pytest.mark.parametrize("truth", ["", [], {"a": 1}, [["x"]]])
def test_the_exact_scorer_refuses_a_ground_truth_that_no_answer_equals(truth):
    with pytest.raises(ValueError, match="is no text; expected one, or a list of texts"):
        score_row("x", "a", truth, scorer="exact")


def test_all_data_sources_of_the_public_surface_are_known():
    surface = """openai/gsm8k lighteval/MATH DigitalLearningGmbH/MATH-lighteval HuggingFaceH4/MATH-500 math_dapo math
    math_dapo_reasoning aime* numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc numina_cn_k12
    numina_olympiads codecontests apps codeforces taco hiyouga/geometry3k searchR1_nq searchR1_triviaqa searchR1_popqa
    searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique searchR1_bamboogle"""
    assert {source for sources in SOURCES.values() for source in sources} == set(surface.split())
    for sources in SOURCES.values():
        for source in sources if "apps" not in sources else ():
            assert callable(find_scorer(source.rstrip("*")))


def test_arguments_of_the_sandbox_reach_scorers_of_code_alone(monkeypatch):
    got = {}
    stand_in = ModuleType("verl.rewards.scorers.code")
    stand_in.score_answer = lambda solution, truth, **kwargs: got.update(kwargs) or {"score": 1, "acc": 1.0, "pred": ""}
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    sandbox = {"sandbox_fusion_url": "http://s", "concurrent_semaphore": None, "memory_limit_mb": 512}
    for source in ("codecontests", "apps", "codeforces", "taco"):
        assert default_compute_score(source, "print(1)", "{}", {"index": 3}, **sandbox) == 1.0
        assert got.pop("extra_info") == {"index": 3} and got == sandbox
    assert default_compute_score("openai/gsm8k", "#### 4", "4", {"index": 1}, **sandbox) == 1.0


def test_the_default_score_is_a_number_and_of_math_dapo_a_dict():
    assert default_compute_score("openai/gsm8k", "it is 4", "4", method="flexible") == 1.0
    assert default_compute_score("math_dapo", "Answer: 5", "4") == {
        "score": -1.0, "acc": 0.0, "pred": "5", "undecided": 0.0,
    }  # fmt: skip
    assert default_compute_score("hiyouga/geometry3k", r"\boxed{4}", "4") == pytest.approx(0.9)


def test_an_unknown_data_source_lists_what_there_is():
    with pytest.raises(NotImplementedError, match=r"'openai/gsm8' \(did you mean 'openai/gsm8k'\?\); built in: .*apps"):
        default_compute_score("openai/gsm8", "x", "y")
    assert not issubclass(NotImplementedError, VerlError)


@pytest.mark.parametrize(
    ("module", "answer", "truth", "score"),
    [
        ("gsm8k", "#### 4", "4", 1.0),
        ("math_reward", r"\boxed{0.5}", r"\frac12", 1.0),
        ("geo3k", r"<think></think>\boxed{5}", "4", 0.1),
        ("search_r1_like_qa_em", "<answer>A dog!</answer>", {"target": ["cat", "dog"]}, 1.0),
        ("math_verify", "so it is $x+1$", "1+x", 1.0),
        ("math_batch", r"\boxed{5}", "4", 0.0),
    ],
)
def test_each_published_module_has_compute_score(module, answer, truth, score):
    found = importlib.import_module(f"verl.utils.reward_score.{module}")
    assert found.compute_score(answer, truth) == pytest.approx(score)


def test_published_functions_of_math_reward():
    from verl.utils.reward_score import math_dapo
    from verl.utils.reward_score.math_reward import is_equiv, last_boxed_only_string, remove_boxed, strip_string

    assert last_boxed_only_string(r"so \boxed{1}, no, \fbox{\frac{1}{2}}.") == r"\boxed{\frac{1}{2}}"
    assert last_boxed_only_string("1") is None
    assert remove_boxed(r"\boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    with pytest.raises(ValueError, match=r"is no \\boxed"):
        remove_boxed("5")
    assert strip_string(r" \dfrac12 \text{ cm} ") == r"\frac{1}{2}"
    assert is_equiv("x+1", "1+x") and not is_equiv("x", "y") and is_equiv(None, None) and not is_equiv(None, "1")
    assert math_dapo.compute_score(r"Answer: 5 \boxed{4}", "4", strict_box_verify=True)["score"] == 1.0


def test_a_batch_is_scored_one_by_one():
    from verl.utils.reward_score.math_batch import compute_score_batched

    assert compute_score_batched(["math"] * 2, [r"\boxed{4}", r"\boxed{5}"], ["4", "4"], [{}, {}]) == [1.0, 0.0]
    assert gsm8k.extract_answer("#### 4") == "4"
