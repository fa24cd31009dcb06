"""Programs and functions are scored by the tests of the ground truth; what is expected never reaches them."""

import json
import time

import pytest

from verl.rewards.sandbox import Limits, ProgramResult, SandboxError
from verl.rewards.scorer_lookup import default_compute_score, score_row
from verl.rewards.scorers import code
from verl.rewards.scorers.code import extract_code
from verl.rewards.scorers.code_tests import is_same_output, is_same_value, read_tests

DOUBLE = "Thus:\n```python\nn = int(input())\nprint(n * 2)\n```\nDone."
ADD = "```python\nclass Solution:\n    def add(self, a: List[int], b: int) -> int:\n        return sum(a) + b\n```"


@pytest.mark.parametrize("as_truth", [dict, json.dumps])
def test_the_score_is_the_share_of_tests_that_pass(as_truth):
    truth = as_truth({"inputs": ["1\n", "2\n", "3\n", ["4", ""]], "outputs": ["2\n", "4\n", "7\n", ["8"]]})
    row = score_row("codecontests", DOUBLE, truth)
    assert row == {
        "score": 0.75, "acc": 0.0, "pred": "n = int(input())\nprint(n * 2)", "tests": 4, "passed": 3, "not_run": 0,
    }  # fmt: skip
    assert score_row("taco", DOUBLE, truth, continuous=False)["score"] == 0.0
    for source in ("codecontests", "apps", "codeforces", "taco"):
        assert default_compute_score(source, DOUBLE, truth) == 0.75


def test_functions_are_called_in_a_class_or_alone_with_arguments_as_values_or_lines_of_json():
    truth = {"fn_name": "add", "inputs": [[[1, 2], 3], "[1]\n2"], "outputs": [[6], "3"]}
    assert score_row("apps", ADD, truth)["acc"] == 1.0
    assert score_row("apps", "def add(a, b): return sum(a) + b", truth)["acc"] == 1.0
    assert score_row("apps", "def plus(a, b): return sum(a) + b", truth)["passed"] == 0
    assert score_row("apps", "def add(a, b): return str(sum(a) + b)", truth)["passed"] == 0


def test_asserts_are_judged_outside():
    answer = "```\nimport math\ndef f(x):\n    return (x, {x: 1}) if x else None\n```"
    asserts = [
        "assert f(1) == (1, {1: 1})", "assert (1, {1: 1}) == f(1)", "assert f(0) is None", "assert not f(0) and f(2)",
        "assert abs(f(3)[0] - 3.0000001) < 1e-3", "assert f(4) != 4", "assert math.isclose(f(5)[0], 5, rel_tol=0.1)",
        "assert {1} == set(f(1)[:1]), 'a message'", "assert f(1)[0] in [1, 2]", "assert f(0) == None\nassert f(1)",
    ]  # fmt: skip
    row = score_row("codecontests", answer, {"assert_case": asserts})
    assert (row["passed"], row["tests"]) == (12, 12)
    wrong = "def f(x): return [x]"
    row = score_row("codecontests", wrong, {"assert_case": asserts})
    assert row["passed"] == 7  # f(2), 3.0000001, != 4, isclose, {1}, in and the last of two


@pytest.mark.parametrize(
    "text",
    [
        "assert all(f(x) for x in [1])", "assert f(1) == g(1)", "x = 1", "assert f(1) < 3", "assert", "assert 1 == 1",
        "assert isinstance(f(1), int)", "assert f(1) == float('inf')", "assert f(1) == b'x'",
        "assert sum(f(1)) or True", "assert " + "(" * 500,
    ],
)  # fmt: skip
def test_a_test_that_the_program_itself_would_judge_is_refused(text):
    with pytest.raises(ValueError, match=r"cannot be taken outside|no assert|no Python"):
        read_tests({"assert_case": [text]})


@pytest.mark.parametrize(
    "truth", ["5", "[]", {}, {"inputs": []}, {"inputs": ["1"], "outputs": []}, {"assert_case": []}]
)
def test_a_ground_truth_without_tests_is_an_error_not_a_score(truth):
    with pytest.raises(ValueError, match="the tests of a program"):
        score_row("apps", DOUBLE, truth)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a\n```python\nx\n```\nb\n```py\ny\n```", "y\n"),
        ("```python\nx\n```\n```output\n3\n```", "x\n"),
        ("```\nx\n```", "x\n"),
        ("x = 1", "x = 1"),
        ("```python\nx = '```'\ny\n", "x = '```'\ny\n"),
        ("<think>```python\nbad\n```</think>\n```Python3\ngood\n```\n", "good\n"),
        ("```json\n{}\n```", "```json\n{}\n```"),
        ("  ```python\n  x\n  ```", "  x\n"),
    ],
)
def test_the_last_fenced_block_of_python_is_the_program(text, found):
    assert extract_code(text) == found


@pytest.mark.parametrize("run", ["a", " ", "\t", "\n ", "`", "```\n"])
def test_the_search_for_a_block_takes_linear_time(run):
    start = time.process_time()
    extract_code("```" + run * 60_000)
    assert time.process_time() - start < 2.0, "held the interpreter; quadratic in the length of the answer"


@pytest.mark.parametrize(
    ("stdout", "expected", "same"),
    [
        (b"1 2\n3\n", b"1 2\n3", True), (b"1  2 \r\n3\n\n", b"1 2\n3\n", True), (b"1 2 3", b"1 2\n3", False),
        (b"1\n\n2", b"1\n2", False), (b"0.3333333", b"0.33333333", True), (b"0.3334", b"0.33333333", False),
        (b"1", b"1.0", True), (b"1.0", b"1", False), (b"1e3", b"1000.0", True), (b"YES", b"yes", False),
        ("\uff11".encode(), b"1", False), ("1\u00a02".encode(), b"1 2", False), (b"1\x002", b"1 2", False),
        (b"nan", b"1.5", False), (b"inf", b"1.5", False), (b"", b"", True), (b"", b"0", False),
        (b"1" * 200, b"1.5", False),
        (b"True", b"1", False), (b"1_0.0", b"10.0", False),
    ],
)  # fmt: skip
def test_outputs_are_compared_word_by_word(stdout, expected, same):
    assert is_same_output(stdout, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True), (1, 1.0, True), (0.1 + 0.2, 0.3, True), (1, 2, False), (True, 1, True), (1, "1", False),
        (None, None, True), (None, 0, False), (None, False, False), ("a", "a", True), ([1, [2]], [1, [2]], True),
        ([1, 2], [2, 1], False), ([1], [1, 1], False), (10**400, 1.0, False), (10**400, 10**400, True),
        (float("nan"), 1.0, False), (float("nan"), float("nan"), False), (float("inf"), 1.0, False),
        ({"dict": [[1, 2]]}, {"dict": [["1", 2]]}, True), ({"dict": [[1, 2]]}, {"dict": [[1, 3]]}, False),
        ({"dict": [[1, 2], [1, 2]]}, {"dict": [[1, 2]]}, True), ({"dict": []}, {"set": []}, False),
        ({"set": [1, 2]}, {"set": [2, 1]}, True), ({"set": [1]}, [1], False), ({"type": "A"}, {"type": "A"}, False),
        ([], None, False), ([1, 2, 3], 6, False), ("", None, False),
        ({"set": [1, 2]}, {"set": [2.0, 1.0]}, True), ({"set": [1]}, {"set": ["1"]}, False),
        ({"set": [0.1 + 0.2]}, {"set": [0.3]}, False), ({"set": [[1, 2.0]]}, {"set": [[1.0, 2]]}, True),
        ({"set": [{"set": [1]}]}, {"set": [{"set": [1.0]}]}, True), ({"set": [1, 2]}, {"set": [1]}, False),
        ({"dict": [[1, 2]]}, {"dict": [[1.0, 2]]}, True),
    ],
)  # fmt: skip
def test_values_are_compared_as_plain_data(value, expected, same):
    assert is_same_value(value, expected) is same


class Recorder:
    """Stands in for the sandbox: keeps what would enter it."""

    def __init__(self, **result):
        self.seen, self.limits = [], []
        self.result = ProgramResult(
            **{"stdout": b"", "stderr": b"", "ending": "exit", "exit_code": 0, "cpu_s": 0.0, **result}
        )

    def run(self, request, stdin, limits):
        self.seen.append(repr(request) + repr(stdin))
        self.limits.append(limits)
        return self.result


@pytest.mark.parametrize(
    "truth",
    [
        {"inputs": ["1", "2"], "outputs": ["expected-1", "expected-2"]},
        {"fn_name": "f", "inputs": [["1"], ["2"]], "outputs": ["expected-1", "expected-2"]},
        {"fn_name": "f", "inputs": ['"1"', '"2"'], "outputs": ['"expected-1"', '"expected-2"']},
        {"assert_case": ["assert f('1') == 'expected-1'", "assert f('2') != 'expected-2'"]},
    ],
)
def test_one_input_enters_the_sandbox_and_nothing_expected(monkeypatch, truth):
    sandbox = Recorder(stdout=b"wrong", exit_code=1)
    monkeypatch.setattr(code, "shared_sandbox", lambda: sandbox)
    assert score_row("apps", "code", truth)["passed"] == 0 and len(sandbox.seen) == 2
    assert not [one for one in sandbox.seen if "expected" in one]
    assert "2" not in sandbox.seen[0] and "1" not in sandbox.seen[1].replace("-1", "")


def test_a_right_output_counts_only_of_a_program_that_ended_by_itself(monkeypatch):
    truth = {"inputs": ["1"], "outputs": ["1"]}
    for ending, exit_code, passed in (("exit", 0, 1), ("exit", 1, 0), ("wall", -9, 0), ("output", -9, 0)):
        monkeypatch.setattr(
            code, "shared_sandbox", lambda e=ending, c=exit_code: Recorder(stdout=b"1", ending=e, exit_code=c)
        )
        assert score_row("apps", "code", truth)["passed"] == passed


def test_an_answer_has_half_a_minute_for_all_its_tests(monkeypatch):
    truth = {"inputs": ["1"] * 20, "outputs": ["1"] * 20}
    sandbox = Recorder(ending="wall", exit_code=-9)
    monkeypatch.setattr(code, "shared_sandbox", lambda: sandbox)
    row = score_row("apps", "code", truth, memory_limit_mb=77)
    assert (row["not_run"], len(sandbox.seen), row["score"]) == (19, 1, 0.0)
    sandbox.result = ProgramResult(b"1", b"", "exit", 0, 7.0)
    row = score_row("apps", "code", truth, limit_s=8)
    assert (row["passed"], row["not_run"], row["acc"]) == (5, 15, 0.0)
    sandbox.result = ProgramResult(b"1", b"", "exit", 0, 0.01, wall_s=29.0)
    assert score_row("apps", "code", truth)["passed"] == 2, "sleeping just below the limit of every test"
    sandbox.result = ProgramResult(b"1", b"", "exit", 0, 3.0, wall_s=29.0)
    assert score_row("apps", "code", truth)["passed"] == 4, "computing on a busy machine"
    assert sandbox.limits[0].memory_mb == 77 and sandbox.limits[5].wall_s == 24.0 and sandbox.limits[5].cpu_s == 8
    assert sandbox.limits[0].output_bytes < Limits.output_bytes


def test_a_sandbox_that_fails_is_an_error_not_a_score(monkeypatch):
    class Failing:
        def run(self, *arguments):
            raise SandboxError("it is broken")

    monkeypatch.setattr(code, "shared_sandbox", Failing)
    with pytest.raises(SandboxError, match="it is broken"):
        score_row("apps", DOUBLE, {"inputs": ["1"], "outputs": ["2"]})
