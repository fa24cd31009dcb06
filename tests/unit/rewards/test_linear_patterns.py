"""Regular expressions of scorers and of parsers of tool calls take time in proportion to a model's text."""

import importlib
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import verl.agent
import verl.rewards.scorers
from verl.rewards.scorers import code_tests, math_answer, math_equality
from verl.rewards.scorers.math_answer import normal_form

LENGTH, NOTICED_S, WORST_RATIO = 10_000, 0.02, 40  # ten times the text takes ten times as long; a hundred is quadratic
# What a text can repeat, and what may stand once before it.
REPEATED = [
    " ", "1", "a", "\\", "{", "}", "(", ")", ".", ",", "$", "*", "#", "\n", "<", ">", "_", "^", "-", "=", '"', " a",
    "1 ", "1,", "{ ", "\\frac", "\\text{", "\\sqrt ", "_ ", "^{", "1/", "\\boxed{", "```", "x=", "answer ", "answer: ",
]  # fmt: skip
BEFORE = ["", "1", "a", "{", "^", "1\\text{", "```python\n", '"name"', "<|channel|>commentary"]
WHOLE = {  # used by fullmatch alone
    math_answer._SLASH, math_answer._PLAIN_UNIT, math_answer._WORDS, math_equality._NUMBER, code_tests._DECIMAL,
    code_tests._NUMBER,
}  # fmt: skip


def modules() -> Iterator[Any]:
    for package in (verl.rewards.scorers, verl.agent):
        for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            if not found.name.endswith("equivalence_child"):  # a program of its own
                yield importlib.import_module(found.name)


def patterns_in(value: Any, depth: int = 0) -> Iterator[re.Pattern]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, list | tuple) and depth < 3:
        for part in value:
            yield from patterns_in(part, depth + 1)
    elif isinstance(value, type) and depth == 0:
        for part in vars(value).values():
            yield from patterns_in(part, depth + 1)


def all_patterns() -> list[re.Pattern]:
    found = {pattern for module in modules() for value in vars(module).values() for pattern in patterns_in(value)}
    return sorted(found, key=lambda pattern: repr(pattern.pattern))


def seconds(call: Callable[[], Any]) -> float:
    samples = []
    for _ in range(3):
        started = time.process_time()
        call()
        samples.append(time.process_time() - started)
    return min(samples)


def use(pattern: re.Pattern, text: str) -> None:
    subject = text.encode() if isinstance(pattern.pattern, bytes) else text
    if pattern in WHOLE:
        pattern.fullmatch(subject)
    else:
        for _ in pattern.finditer(subject):
            pass


def growth(pattern: re.Pattern, before: str, repeated: str) -> float:
    """How much longer ten times the text takes; 0 where it takes no time that counts."""
    short, long = (before + repeated * (length // len(repeated)) for length in (LENGTH // 10, LENGTH))
    started = time.process_time()
    use(pattern, long)
    if time.process_time() - started < NOTICED_S:
        return 0.0
    return seconds(lambda: use(pattern, long)) / max(seconds(lambda: use(pattern, short)), 1e-5)


def test_every_pattern_takes_time_in_proportion_to_the_text():
    patterns = all_patterns()
    assert len(patterns) >= 60
    slow = [
        (pattern.pattern, before, repeated)
        for pattern in patterns
        for before in BEFORE
        for repeated in REPEATED
        if growth(pattern, before, repeated) > WORST_RATIO
    ]
    assert slow == []


def test_a_quadratic_pattern_is_found():
    assert growth(re.compile(r"\s+x"), "", " ") > WORST_RATIO


@pytest.mark.parametrize("text", [" ", " \t", r"\ ", r"\text{ } ", "a ", "1 "])
def test_a_box_of_spaces_takes_time_in_proportion_to_them(text):
    short, long = ("5" + text * (length // len(text)) + r"\text" for length in (190, 1900))
    normal_form.cache_clear()
    once = seconds(lambda: normal_form.__wrapped__(short))
    assert seconds(lambda: normal_form.__wrapped__(long)) < WORST_RATIO * max(once, 1e-4)
