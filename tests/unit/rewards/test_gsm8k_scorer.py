"""The GSM8K scorer."""

import json
import time

import pytest

from verl.rewards.scorers.gsm8k import compute_score, extract_answer, score_answer


def gold_answers(folder):
    for name in ("train", "test"):
        for line in (folder / "gsm8k" / f"{name}.jsonl").read_text().splitlines():
            yield json.loads(line)["answer"]


def test_every_gold_answer_scores_one_and_its_neighbour_zero(test_data):
    count = 0
    for answer in gold_answers(test_data):
        truth = answer.rsplit("####", 1)[1].strip()
        assert compute_score(answer, truth) == compute_score(answer, truth.replace(",", "")) == 1.0, answer
        assert compute_score(answer, truth, method="flexible") == 1.0, answer
        assert compute_score(answer, str(int(truth.replace(",", "")) + 1)) == 0.0, answer
        count += 1
    assert count == 7473 + 1319


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 72", "72", "72"),
        ("####72", "72", "72"),
        ("so\n#### $1,234.50.", "1234.5", "1234.5"),
        ("#### -3", "-3", "-3"),
        ("#### -$3", "-3", "-3"),
        ("#### $-3", "-3", "-3"),
        ("#### \u22123", "-3", "-3"),
        ("#### **18**", "18", "18"),
        ("#### 18 clips", "18", "18"),
        ("#### 50%", "50", "50"),
        ("#### .5", "0.5", "0.5"),
        ("#### 5.0", "5", "5"),
        ("#### 1,000,000", "1000000", "1000000"),
        ("#### 100", "100", "100"),
        ("#### 1 no wait\n#### 2", "2", "2"),
        ("#### 7\nthat is all 8 of them", "7", "8"),
        ("the answer is 72.", None, "72"),
        ("####\n72", None, "72"),
        ("#### seventy-two", None, None),
        ("10-3", None, "3"),
        ("it fell to -3 degrees", None, "-3"),
        ("(-3)", None, "-3"),
        ("48/2 = <<48/2=24>>24", None, "24"),
        ("room 5b costs $9", None, "9"),
        ("v1.2", None, None),
        ("", None, None),
        ("1,2,3", None, "3"),
        ("#### 18/20", None, "20"),  # an expression is no number
        ("#### 3 + 4 = 7", None, "7"),
        ("#### 2e3", None, "2"),
        ("#### 1.2.3", None, "1.2"),
        ("#### 5\n#### 3*4", None, "4"),
        ("#### \\boxed{18}", "18", "18"),
        ("#### $\\boxed{1,018}$", "1018", "1018"),
        ("#### \uff11\uff0c\uff13\uff11\uff19", "1319", "1319"),  # full-width digits and comma
        ("#### 1,2345", "1", "2345"),  # a comma that groups no thousands separates
    ],
)
def test_the_number_is_found_as_people_write_it(text, strict, flexible):
    assert extract_answer(text) == strict
    assert extract_answer(text, "flexible") == flexible


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("72", "72.0"), ("1,000", "1000"), ("-0.50", "-.5"), ("$5", "5"), ("5", "$5"), ("007", "7"), ("0", "-0")],
)
def test_numbers_are_compared_as_numbers_not_as_text(answer, truth):
    assert compute_score(f"#### {answer}", truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [("72", "-72"), ("1.001", "1"), ("10", "100"), ("12345678901234567891", "12345678901234567890")],
)
def test_different_numbers_do_not_pass(answer, truth):
    assert compute_score(f"#### {answer}", truth) == 0.0


def test_a_wrong_answer_in_the_right_format_gets_the_format_score():
    assert compute_score("#### 3", "4", format_score=0.1) == 0.1
    assert compute_score("3", "4", format_score=0.1) == 0.0
    assert compute_score("#### 4", "4", score=2.0) == 2.0


def test_a_ground_truth_that_is_no_number_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="ground truth 'many' is not a number"):
        compute_score("#### 3", "many")
    with pytest.raises(ValueError, match="allowed: strict, flexible"):
        compute_score("#### 3", "3", method="loose")


def test_the_verdict_names_the_prediction_for_the_majority_vote():
    assert score_answer("#### 1,000", "999") == {"score": 0.0, "acc": 0.0, "pred": "1000"}
    assert score_answer("#### 3", "4", format_score=0.1) == {"score": 0.1, "acc": 0.0, "pred": "3"}
    assert score_answer("hm", "4")["pred"] == ""


def test_a_long_answer_is_read_in_no_time():
    started = time.monotonic()
    assert extract_answer("1," * 100_000, "flexible") == "1"
    assert extract_answer("####" * 100_000 + " x") is None
    assert extract_answer("#### " + "$ " * 100_000) is None
    assert extract_answer("1" * 100_000 + "x", "flexible") is not None
    assert time.monotonic() - started < 30  # a tenth of a second; patterns took minutes


def test_every_digit_of_a_long_number_counts():
    digits = "1234567890" * 5
    assert extract_answer(f"#### {digits}1.50") == f"{digits}1.5"
    assert compute_score(f"#### -{digits}1", f"-{digits}1") == 1.0
    assert compute_score(f"#### {digits}1", f"{digits}2") == 0.0
