"""Which part of a solution each scorer reads, and the score it gives: cases decided by the written rule."""

import numpy as np
import pytest

from tests.conftest import import_or_skip
from verl.rewards.scorers import geo3k, math_dapo, math_reward, prime_math, search_r1_like_qa_em


@pytest.fixture(autouse=True, scope="module")
def _math_verify():
    import_or_skip("math_verify")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("Answer: 34", "34"),
        ("so\n\nAnswer: $34$", "$34$"),
        ("**Answer:** 34", "34"),
        ("**Answer: 34**", "34**"),
        ("Final answer: 34", "34"),
        (r"Answer: \boxed{34}", r"\boxed{34}"),
        ("Answer: 33\nAnswer: 34", "34"),
        ("Answer: 34\nThat took long.", "34"),
        ("Answer: 34" + " x" * 200, None),  # not within the last 300 characters
        ("the answer is 34", None),
        ("Answer:\n34", "34"),
        ("Answer:", None),
        ("unanswer: 34", None),
        ("", None),
    ],
)
def test_dapo_reads_the_last_line_that_says_answer(solution, answer):
    assert math_dapo.extract_answer(solution) == answer


def test_dapo_scores_plus_and_minus_one():
    assert math_dapo.score_answer("**Answer: 34**", "34") == {"score": 1.0, "acc": 1.0, "pred": "34", "undecided": 0.0}
    assert math_dapo.score_answer("34", "34") == {"score": -1.0, "acc": 0.0, "pred": "", "undecided": 0.0}
    assert math_dapo.score_answer(r"\boxed{34}", "34", strict_box_verify=True)["score"] == 1.0
    assert math_dapo.score_answer("Answer: 34", "34", strict_box_verify=True)["score"] == -1.0
    assert math_dapo.score_answer(r"\boxed{34}" + " x" * 200, "34", strict_box_verify=True)["score"] == -1.0
    assert math_dapo.score_answer("Answer: 033", 33)["score"] == 1.0


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"1, so \boxed{4}", "4"),
        (r"the answer is 5. \boxed{4}", "4"),
        (r"\boxed{4", None),
        ("The answer is 4. It is even.", "4"),
        ("The answer is: $\\frac{1}{2}$.", "$\\frac{1}{2}$"),
        ("the answer is 3.5.\nDone", "3.5"),
        ("Answer: 4", "4"),
        ("we get $x$, then $y+1$ in the end", "y+1"),
        ("we get 3, then -1,234.5 in the end", "-1,234.5"),
        ("it is 3/4", "3/4"),
        ("no idea", None),
    ],
)
def test_numina_answers_are_boxed_or_last(solution, answer):
    assert prime_math.extract_answer(solution) == answer


def test_only_a_box_is_an_answer_to_math():
    assert math_reward.score_answer(r"\boxed{2\sqrt2}", r"\sqrt{8}")["acc"] == 1.0
    assert math_reward.compute_score("The answer is 4", "4") == 0.0
    assert math_reward.compute_score(r"\boxed{5} or \boxed{4}", "4") == 1.0
    assert math_reward.compute_score(r"\boxed{4} or \boxed{5}", "4") == 0.0
    assert math_reward.compute_score(r"\boxed{4, 5}", "4") == 0.0


def test_predictions_that_are_the_same_are_one_vote():
    preds = {
        math_reward.score_answer(rf"\boxed{{{text}}}", "1")["pred"] for text in (r"\frac12", r"\dfrac{1}{2}", "1/2")
    }
    assert preds == {r"\frac{1}{2}"}


@pytest.mark.parametrize("scorer", [math_reward, math_dapo, prime_math, geo3k])
@pytest.mark.parametrize("truth", ["", "  "])
def test_a_ground_truth_without_text_is_an_error_not_a_zero(scorer, truth):
    with pytest.raises(ValueError, match=r"ground truth .* is empty"):
        scorer.score_answer(r"\boxed{4}", truth)


@pytest.mark.parametrize(
    ("solution", "score", "form"),
    [
        (r"<think>so</think> it is \boxed{4}", 1.0, 1.0),
        (r"  <think>so</think>\boxed{4}", 1.0, 1.0),
        (r"<think>so</think> it is \boxed{5}", 0.1, 1.0),
        (r"\boxed{4}", 0.9, 0.0),
        (r"<think>\boxed{4}</think> 4", 0.9, 0.0),
        (r"so <think></think>\boxed{4}", 0.9, 0.0),
        (r"<think>so \boxed{4}", 0.9, 0.0),
        ("<think></think> 4", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_geometry_weighs_answer_and_format(solution, score, form):
    verdict = geo3k.score_answer(solution, "4")
    assert (verdict["score"], verdict["format"]) == (pytest.approx(score), form)


def test_geometry_without_box_compares_what_follows_the_thought():
    assert geo3k.compute_score("<think>5</think> 4", "4", use_boxed=False) == pytest.approx(0.9)
    assert geo3k.compute_score(r"<think></think> \boxed{5}", "4", format_score=0.4) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("solution", "targets", "score"),
    [
        ("<answer>Paris</answer>", ["Paris"], 1.0),
        ("<answer> the PARIS! </answer>", ["paris"], 1.0),
        ("<answer>An  apple, a day</answer>", ["apple day"], 1.0),
        ("<answer>Lyon</answer><answer>Paris</answer>", ["Paris"], 1.0),
        ("<answer>Paris</answer><answer>Lyon</answer>", ["Paris"], 0.0),
        ("<answer>Paris, France</answer>", ["Paris"], 0.0),
        ("<answer>Lutetia</answer>", ["Paris", "Lutetia"], 1.0),
        ("<answer>Lyon</answer>", ["Paris"], 0.0),
        ("<answer></answer>", ["Paris"], 0.0),
        ("<answer>the</answer>", ["Paris", "The"], 0.0),
        ("Paris", ["Paris"], 0.0),
        ("<answer>Paris", ["Paris"], 0.0),
        ("</answer>Paris<answer>", ["Paris"], 0.0),
    ],
)
def test_search_answers_match_exactly_after_the_normal_form_of_squad(solution, targets, score):
    assert search_r1_like_qa_em.compute_score(solution, {"target": targets}) == score


def test_targets_may_be_one_text_a_list_or_an_array():
    for truth in ("Paris", ["Paris"], {"target": "Paris"}, {"target": np.array(["Paris", "x"], dtype=object)}):
        assert search_r1_like_qa_em.compute_score("<answer>paris</answer>", truth) == 1.0
    for truth in ({}, {"target": []}, None, {"targets": ["Paris"]}, {"target": ["the"]}):
        with pytest.raises(ValueError, match="has no target; expected"):
            search_r1_like_qa_em.compute_score("<answer>paris</answer>", truth)
    with pytest.raises(ValueError, match="allowed: strict"):
        search_r1_like_qa_em.compute_score("x", "y", method="loose")


def test_a_wrong_search_answer_may_get_a_score_for_its_format():
    values = [
        search_r1_like_qa_em.compute_score(text, "Paris", format_score=0.2, score=2.0)
        for text in ("<answer>Paris</answer>", "<answer>Lyon</answer>", "Paris")
    ]
    assert values == [2.0, 0.2, 0.0]
