"""What a reward function may return, read into a `Score`."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np

from verl.rewards.base import Score


def read_score(result: object) -> Score:
    """The score in a reward function's result; ValueError says why there is none.

    A number or bool is the value, and is stored as `acc` too. A dict must hold it under `score`; its other keys become
    extra columns. `{"abstain": True}` declines to score.
    """
    if isinstance(result, Mapping):
        return _read_score_dict(result)
    value = read_number(result)
    return Score(value=value, extra={"acc": value})


def _read_score_dict(result: Mapping[Any, Any]) -> Score:
    extra = {str(key): value for key, value in result.items() if key not in ("score", "abstain")}
    if result.get("abstain"):
        return Score(value=None, extra=extra)
    if "score" not in result:
        keys = ", ".join(map(repr, result)) or "no keys"
        raise ValueError(f"the returned dict has no 'score' (it has {keys})")
    return Score(value=read_number(result["score"]), extra=extra)


def read_number(value: object) -> float:
    """A finite float from a Python, numpy or zero-dimensional tensor number."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy scalars and 0-d tensors of any library
        value = value.item()
    if not isinstance(value, Real | np.bool_):
        raise ValueError(f"expected a number, a bool or a dict with 'score', got {type(value).__name__}: {value!r:.80}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"the score is {number}; it must be finite")
    return number
