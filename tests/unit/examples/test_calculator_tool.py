"""The calculator of the tool example: exact arithmetic, and nothing but arithmetic. And its reward, and its rows."""

import asyncio
import json
import random
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest

from verl.agent.tools import call_tool, load_tools
from verl.commands.check_template import check_template
from verl.utils.external_code import load_module

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gsm8k_multiturn_w_tool"


def load(name: str) -> ModuleType:
    return load_module(str(EXAMPLE / f"{name}.py"), "test")


def ask(expression: object) -> str:
    tools = load_tools(None, str(EXAMPLE / "tools.py"))
    response, _, _ = asyncio.run(call_tool(tools, "calculator", json.dumps({"expression": expression}), {}))
    return response.text or ""


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48*75-39", "3561"),
        ("(12+34)*56", "2576"),
        ("7/2", "3.5"),
        ("-3--4", "1"),
        ("0.1+0.2", "0.3"),
        (" 1/3", "0.333333"),
    ],
)
def test_it_calculates(expression: str, result: str):
    assert ask(expression) == result


def test_it_agrees_with_arithmetic_built_beside_the_text():
    rng = random.Random(0)

    def build(depth: int) -> tuple[str, Fraction]:
        if depth == 0:
            number = rng.randint(1, 99)
            return str(number), Fraction(number)
        (left, a), (right, b) = build(depth - 1), build(rng.randint(0, depth - 1))
        sign = rng.choice("+-*")
        return f"({left}){sign}({right})", {"+": a + b, "-": a - b, "*": a * b}[sign]

    for _ in range(200):
        text, value = build(3)
        if len(text) <= 100:
            assert Fraction(ask(text)) == value


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "2**9",
            "1/0",
            "abs(3)",
            "x",
            "__import__('os')",
            "True+1",
            "1e999",
            "(1).real",
            "1;2",
            "",
            "9" * 101,
            7,
            None,
        ),
        *("(" * 99, "1 if 1 else 2", "'a'*9", "[1]", "1j", "10 // 3", "1 << 9"),
    ],
)
def test_everything_else_is_an_error_as_a_reply(expression: object):
    assert ask(expression).startswith("Error when executing calculator: ")


@pytest.mark.parametrize(
    ("text", "turns", "score", "tool"),
    [
        ("#### 42", 2, 1.0, 0.0),
        ("<tool_call>x</tool_call><tool_response>42</tool_response>#### 42", 4, 1.0, 1.0),
        ("<tool_call>x</tool_call><tool_response>42</tool_response>#### 42", 2, 1.0, 0.0),  # written by the policy
        ("<tool_call>x</tool_call><tool_response>Error: no</tool_response>#### 42", 4, 1.0, 0.0),
        ("#### 42<tool_call>x</tool_call><tool_response>42</tool_response>", 4, 0.0, 1.0),
        ("#### 421", 2, 0.0, 0.0),
        ("42", 2, 0.0, 0.0),
        ("#### 42 or 43", 2, 0.0, 0.0),
    ],
)
def test_only_the_right_last_answer_earns(text: str, turns: int, score: float, tool: float):
    verdict = load("reward").compute_score("x", text, "42", {"num_turns": turns})
    assert verdict == {"score": score, "acc": score, "tool": tool}


def test_problems_are_held_out_and_the_template_is_sound(tmp_path: Path):
    prepare = load("prepare")
    prepare.prepare(tmp_path, worked=60, train=100, test=30)
    rows = {name: read(tmp_path / "data" / f"{name}.jsonl") for name in ("sft", "train", "test")}
    asked = [row["messages"][0]["content"] for row in rows["sft"]]
    asked += [row["prompt"][0]["content"] for row in rows["train"] + rows["test"]]
    assert len(set(asked)) == len(asked) == 190
    calls = [m["tool_calls"][0]["function"] for row in rows["sft"] for m in row["messages"] if m.get("tool_calls")]
    assert 5 < len(calls) < 40
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    report = check_template(tokenizer, conversations=30)
    assert report.passed and not report.notes, (report.problems, report.notes)
    assert [len(tokenizer(digits)["input_ids"]) for digits in ("7", "42", "1234")] == [1, 2, 4]


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
