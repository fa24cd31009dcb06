"""Conversion of a reward function's result into a `Score`."""

import math
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from verl.rewards.base import Score


def read_score(result: object) -> Score:
    """The Score of a reward function's result; ValueError where the result is not valid.

    A number or bool is the value, and is stored as `acc` too. A dict has the value under `score`; its other keys become
    extra columns. `{"abstain": True}` is an abstention.
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
    return Score(value=read_number(result["score"], "the dict's 'score' must be a number, not"), extra=extra)


def read_number(value: object, wrong: str = "expected a number, a bool or a dict with 'score', got") -> float:
    """A finite float from a Python, numpy or zero-dimensional tensor number; `wrong` begins the error about a type."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy scalars and 0-d tensors of any library
        value = value.item()
    if not isinstance(value, Real | np.bool_):
        shown = safe_text(value, repr)[:80]
        raise ValueError(f"{wrong} {type(value).__name__}: {shown}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"the score is a number beyond {sys.float_info.max:.1e}; it must be finite") from None
    if not math.isfinite(number):
        raise ValueError(f"the score is {number}; it must be finite")
    return number


def safe_text(value: object, text: Callable[[object], str] = str) -> str:
    """`text(value)`, also of a user's object whose own method for it fails."""
    try:
        return text(value)
    except BaseException as error:
        return f"<{type(value).__name__}, whose {text.__name__}() raised {type(error).__name__}>"


def is_equal(row: object, given: object) -> bool:
    """Whether `given` still has everything that `row` has, with equal values; keys may be added."""
    if isinstance(row, Mapping) and isinstance(given, Mapping):
        return all(key in given and is_equal(value, given[key]) for key, value in row.items())
    if isinstance(row, list | tuple) and isinstance(given, list | tuple):
        return len(row) == len(given) and all(map(is_equal, row, given))
    if isinstance(row, str | bytes | int | float | bool | None):
        return type(row) is type(given) and (row == given or row != row)
    if isinstance(row, np.ndarray):
        return isinstance(given, np.ndarray) and row.tobytes() == given.tobytes()
    return True  # an object with an equality of its own
