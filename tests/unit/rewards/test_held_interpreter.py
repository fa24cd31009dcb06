"""A reward function that lets no other thread run is shown, though nothing of ours can run meanwhile."""

import itertools
import re
import time

import pytest

from tests.unit.rewards.test_function_reward import item, score, wrap


@pytest.mark.parametrize("word", ["sync", "async"])
def test_a_call_that_lets_no_other_thread_run_is_shown_with_its_line(monkeypatch, capfd, word: str):
    """A regular expression that backtracks keeps the interpreter to itself until it is done."""
    monkeypatch.setattr("verl.rewards.held_interpreter.HELD_S", 0.0)

    def backtrack() -> float:
        start = time.monotonic()
        for length in itertools.count(20):  # each takes twice as long as the one before
            re.match("(a+)+$", "a" * length + "b")
            if time.monotonic() - start > 2.0:
                return 1.0

    async def later(**_) -> float:
        return backtrack()

    [answer] = score(
        wrap(later if word == "async" else lambda **_: backtrack(), timeout_s=0.4, on_error="count"), item()
    )
    said = capfd.readouterr().err
    assert "Timeout (0:00:00.400000)!" in said and "test_held_interpreter.py" in said and "in backtrack" in said
    assert answer.value in (1.0, None)
