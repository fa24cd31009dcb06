"""A thousand fuzzed answers to each scorer keep the laws of scripts/soak/scorers.py."""

import pytest

from scripts.soak.scorers import NAMES, check, fuzzed
from tests.conftest import import_or_skip
from verl.rewards.scorer_lookup import SOURCES, find_scorer


@pytest.mark.parametrize("name", NAMES)
def test_no_fuzzed_answer_breaks_a_scorer(name):
    import_or_skip("math_verify")
    found = check(name, find_scorer(SOURCES[name][0]), list(fuzzed(name, 1000, seed=1)))
    assert 20 <= found["right"] <= 500


def test_a_scorer_that_breaks_a_law_is_found():
    pairs = [("a", "1"), ("b", "1")]
    seen = []

    def forgetful(answer, truth):
        seen.append(answer)
        return {"score": float(len(seen) > 2), "acc": 1.0, "pred": answer}

    with pytest.raises(AssertionError, match="and from a thread as"):
        check("gsm8k", forgetful, pairs)
    with pytest.raises(AssertionError, match="nan"):
        check("gsm8k", lambda answer, truth: {"score": float("inf") * 0, "acc": 1.0, "pred": answer}, pairs)
    with pytest.raises(ZeroDivisionError):
        check("gsm8k", lambda answer, truth: {"score": 1 / 0}, pairs)
