"""Equality of mathematical answers against pairs that were judged by hand."""

import json
from pathlib import Path

import pytest

from tests.conftest import ROOT, import_or_skip
from verl.rewards.scorers.math_answer import last_boxed, normal_form
from verl.rewards.scorers.math_equality import exact_number, is_equal

PAIRS = Path(__file__).parents[2] / "data" / "scorers" / "math_pairs.jsonl"


def read_pairs() -> list[dict]:
    return [json.loads(line) for line in PAIRS.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(autouse=True, scope="module")
def _math_verify():
    import_or_skip("math_verify")


def test_pairs_that_a_person_judged_are_judged_the_same():
    pairs = [pair for pair in read_pairs() if "known_error" not in pair]
    assert len(pairs) >= 500 and sum(pair["equal"] for pair in pairs) >= 250
    assert sum(not pair["equal"] for pair in pairs) >= 200
    wrong = [pair for pair in pairs if is_equal(pair["gold"], pair["answer"]) is not pair["equal"]]
    assert wrong == []


def test_equality_does_not_depend_on_which_side_is_the_ground_truth():
    pairs = [pair for pair in read_pairs() if "known_error" not in pair and pair["answer"].strip()]
    wrong = [pair for pair in pairs if is_equal(pair["answer"], pair["gold"]) is not pair["equal"]]
    assert wrong == []


def test_the_errors_that_the_page_lists_are_those_that_are_made():
    page = (ROOT / "docs" / "rewards" / "scorers.md").read_text(encoding="utf-8")
    errors = [pair for pair in read_pairs() if "known_error" in pair]
    assert errors
    for pair in errors:
        assert is_equal(pair["gold"], pair["answer"]) is (not pair["equal"]), f"repaired: {pair}"
        assert pair["known_error"] in page and f"`{pair['gold']}`" in page, pair


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} and then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\fbox{3}", "3"),
        (r"\boxed{1} \fbox{2}", "2"),
        (r"\boxed {4}", "4"),
        (r"\boxed 4", "4"),
        (r"$\boxed 4$", "4"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right\}} end }", r"\left\{ x \right\}"),
        (r"\boxed{1\\}", r"1\\"),  # a new row, and the end
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{1} \boxed{2", None),
        (r"\boxed", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_box_is_found(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", "7"), ("-1,234.50", "-2469/2"), (r"\frac{3}{4}", "3/4"), (r"-\frac{-3}{4}", "3/4"),
        (r"1\frac{1}{2}", "3/2"), (r"0.1\overline{6}", "1/6"), ("1e3", "1000"), (r"1.5\times10^{-2}", "3/200"),
    ],
)  # fmt: skip
def test_a_number_has_its_exact_value(text, value):
    from fractions import Fraction

    assert exact_number(text) == Fraction(value)


@pytest.mark.parametrize("text", ["", "x", "1,23", r"\frac{1}{0}", "1e999", "--1", "1" * 2000, "nan", r"1\frac{1}{2}3"])
def test_what_is_no_number_has_no_value(text):
    assert exact_number(text) is None


def test_a_long_or_deep_answer_costs_no_comparison():
    assert is_equal("x", "x+" * 600 + "1") is False
    assert is_equal(r"\{1,2\}", r"\{" + ",".join(map(str, range(10_000))) + r"\}") is False
    assert last_boxed(r"\boxed{" + "{" * 100_000) is None
    for character in "{ 1\\(":
        assert is_equal("x", character * 100_000) is False


def test_units_are_kept_apart_from_the_value():
    assert normal_form(r"5\text{ cm}^2")[:2] == ("5", "cm^2")
    assert normal_form("12 dollars")[:2] == ("12", "dollars")
    assert normal_form(r"\text{east}")[:2] == ("east", "")
    assert normal_form(r"50\%")[:3] == ("50", "", True)


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("3xyz", "-3xyz", False), ("abc", "a+b+c", False), ("AB+1", "AB-1", False), ("A-a", "0", False),
        (r"3x\cdot y\cdot z", "3xyz", True), ("abx+0", "bxa", True), ("57+38", "57(38)", False), ("2(3)", "6", True),
        ("3", "x=4=3", False), ("3", "x=2+1=3", True), ("4", "2+1=4", False), ("4", "2x=4", False),
        ("4", "x+y=4", False),        ("4", "f(2)=4", True), ("x=3", "x=7=3", False),
        ("5", r"5\text{6}", False), ("5", r"5\text{6 cm}", False),
        ("5", r"5\text{x}", False), ("5", "5 xyz", False), (r"\text{if }x>0", r"\text{if }x<0", False),
        (r"\angle ABC", r"\angle ACB", False), (r"\text{no}", "on", False), (r"\text{Option 2}", "option 2", True),
        (r"\text{Area}=5", "5", True),
    ],
)  # fmt: skip
def test_letters_beside_signs_are_variables_and_chains_must_hold(gold, answer, equal):
    assert is_equal(gold, answer) is equal
