"""The reward of examples/gsm8k_calculator: parsed, never evaluated, and hard to cheat."""

import importlib.util
import json
from fractions import Fraction
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[3] / "examples" / "gsm8k_calculator" / "reward.py"
spec = importlib.util.spec_from_file_location("calculator_reward", PATH)
assert spec is not None and spec.loader is not None
reward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reward)


QUESTION = "Ann has 2 apples, 3 pears, 5 nuts and 7 figs. How many?"


def score(text: str, truth: str = "10", question: str = QUESTION) -> float:
    return reward.compute_score("gsm8k_calculator", text, truth, {"question": question})["score"]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2+3*4", 14), ("(2+3)*4", 20), ("10-4-3", 3), ("8/4/2", 1), ("-3+5", 2), (".5*4", 2), ("1/3", Fraction(1, 3))],
)
def test_arithmetic_has_its_usual_meaning(expression: str, value: Fraction):
    assert reward.evaluate(expression) == value


@pytest.mark.parametrize("text", ["", "2+", "(2", "2)", "a+1", "2**9**9", "__import__('os')", "1/0", "2 3"])
def test_anything_else_has_no_value(text: str):
    assert reward.evaluate(text) is None


def test_a_right_answer_scores_one_and_each_wrong_sum_costs_its_share():
    right = "a <<2+3=5>>5 b <<5*2=10>>10\n#### 10"
    assert score(right) == 1.0
    assert score(right.replace("2+3=5", "2+3=6")) == pytest.approx(0.6)


def test_a_final_line_that_does_not_repeat_the_last_value_earns_nothing_for_it():
    assert score("<<2+3=5>> <<5*2=10>>\n#### 11") == pytest.approx(0.8)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "#### 10",
        "<<2+3=5>>\n#### 5",
        "<<2+3=5>><<2 + 3=5>>\n#### 5",
        "<<5+0=5>><<5*1=5>>\n#### 5",
        "<<2/2=1>><<3/3=1>>\n#### 1",
        "<<7-7=0>><<5-5=0>>\n#### 0",
        "<<5-3+3=5>><<7*2/2=7>>\n#### 7",
        "<<44+44=88>><<88+88=176>>\n#### 176",
        "<<4*1=4>><<4+4=8>><<8+8=16>>\n#### 16",
    ],
    ids=[
        "empty",
        "no sum",
        "one",
        "repeated",
        "0 and 1",
        "x/x",
        "x-x",
        "gives an operand",
        "not of the question",
        "x*1",
    ],
)
def test_fewer_than_two_different_expressions_that_say_something_earn_nothing(text: str):
    assert score(text) == 0.0


def test_an_earlier_right_result_may_be_used_and_a_wrong_one_may_not():
    assert score("<<5+7=12>><<12*4=48>>\n#### 48") == 1.0
    assert score("<<5+7=13>><<13*4=52>>\n#### 52") == 0.0


def test_an_expression_that_does_not_count_changes_no_share():
    assert score("<<2/2=1>><<2+3=5>><<5*2=11>><<5+5=10>>\n#### 10") == pytest.approx(0.8 * 2 / 3 + 0.2)


def test_rounded_decimals_are_right_to_the_digits_written():
    assert reward.verdict("1/3", "0.33") and not reward.verdict("1/3", "0.34") and not reward.verdict("7/2", "3")


def test_gold_answers_are_exact_and_calculate_correctly(test_data: Path):
    rows = [json.loads(line) for line in (test_data / "gsm8k" / "test.jsonl").read_text().splitlines()]
    results = [
        reward.compute_score("", r["answer"], r["answer"].rpartition("####")[2].strip(), {"question": r["question"]})
        for r in rows
    ]
    counted = [r for r in results if r["expressions"] >= 2]
    assert all(r["acc"] == 1.0 for r in results)
    assert len(counted) / len(results) > 0.8  # others calculate with numbers that the question has in words
    assert sum(r["arithmetic"] for r in counted) / len(counted) > 0.97
