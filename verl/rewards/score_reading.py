"""Conversion of a reward function's result into a `Score`."""

import math
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

import numpy as np

from verl.rewards.base import Score


def read_score(result: object, weights: Mapping[str, float] | None = None) -> Score:
    """The Score of a reward function's result; ValueError where the result is not valid.

    A number or bool is the value, and is stored as `acc` too. A dict has the value under `score`; its other keys become
    extra columns. With `weights`, the value is the weighted sum of the keys that they name, and `score` is one of them
    or an extra column. `{"abstain": True}` is an abstention.
    """
    if isinstance(result, Mapping):
        return _read_score_dict(result, weights or {})
    value = read_number(result)
    return Score(value=_weighted_sum({"score": value}, weights) if weights else value, extra={"acc": value})


def _read_score_dict(result: Mapping[Any, Any], weights: Mapping[str, float]) -> Score:
    left_out = ("abstain",) if weights else ("abstain", "score")
    extra = {str(key): _plain(value) for key, value in result.items() if key not in left_out}
    if result.get("abstain"):
        return Score(value=None, extra=extra)
    if weights:
        return Score(value=_weighted_sum(extra, weights), extra=extra)
    if "score" not in result:
        keys = ", ".join(map(repr, result)) or "no keys"
        raise ValueError(f"the returned dict has no 'score' (it has {keys})")
    return Score(value=read_number(result["score"], "the dict's 'score' must be a number, not"), extra=extra)


def _weighted_sum(parts: Mapping[str, object], weights: Mapping[str, float]) -> float:
    total = 0.0
    for name, weight in weights.items():
        if name not in parts:
            raise ValueError(
                f"it returned no {name!r}, which reward.weights.{name} weighs (it has {', '.join(map(repr, parts))})"
            )
        what = f"the part {name!r} of the reward"
        total += weight * read_number(parts[name], f"{what} must be a number, not", what)
    return total


def _plain(value: Any) -> Any:
    """The Python value of a numpy scalar or 0-d tensor of any library; any other value as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def read_number(
    value: object, wrong: str = "expected a number, a bool or a dict with 'score', got", what: str = "the score"
) -> float:
    """A finite float from a Python, numpy or zero-dimensional tensor number; `wrong` begins the error about a type."""
    value = _plain(value)
    if not isinstance(value, Real | np.bool_):
        shown = safe_text(value, repr)[:80]
        raise ValueError(f"{wrong} {type(value).__name__}: {shown}")
    try:
        number = float(value)
    except OverflowError:
        raise ValueError(f"{what} is a number beyond {sys.float_info.max:.1e}; it must be finite") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}; it must be finite")
    return number


def safe_text(value: object, text: Callable[[object], str] = str) -> str:
    """`text(value)`, also of a user's object whose own method for it fails."""
    try:
        return text(value)
    except BaseException as error:
        return f"<{type(value).__name__}, whose {text.__name__}() raised {type(error).__name__}>"
