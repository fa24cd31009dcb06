"""The reward of examples/gsm8k_calculator: parsed, never evaluated, and hard to cheat."""

import importlib.util
import json
from fractions import Fraction
from pathlib import Path

import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "gsm8k_calculator" / "reward.py"
spec = importlib.util.spec_from_file_location("calculator_reward", PATH)
assert spec is not None and spec.loader is not None
reward = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reward)


def score(text: str, truth: str = "10") -> float:
    return reward.compute_score("gsm8k_calculator", text, truth)["score"]


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
    "text", ["", "#### 10", "<<2+3=5>>\n#### 5", "<<2+3=5>><<2+3=5>>\n#### 5", "<<5+0=5>><<5*1=5>>\n#### 5"]
)
def test_fewer_than_two_different_non_trivial_expressions_earn_nothing(text: str):
    assert score(text) == 0.0


def test_rounded_decimals_are_right_to_the_digits_written():
    assert reward.verdict("1/3", "0.33") and not reward.verdict("1/3", "0.34") and not reward.verdict("7/2", "3")


def test_gold_answers_are_exact_and_calculate_correctly(test_data: Path):
    lines = (test_data / "gsm8k" / "test.jsonl").read_text().splitlines()
    answers = [json.loads(line)["answer"] for line in lines]
    results = [reward.compute_score("", a, a.rpartition("####")[2].strip()) for a in answers]
    assert all(r["acc"] == 1.0 for r in results)
    assert sum(r["arithmetic"] for r in results) / len(results) > 0.97
