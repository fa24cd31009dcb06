"""Import path for outside code to the MATH scorer, and to the four functions that published code takes from it."""

from verl.rewards.scorers.math_answer import last_boxed, normal_form
from verl.rewards.scorers.math_equality import is_equal
from verl.rewards.scorers.math_reward import compute_score

__all__ = ["compute_score", "is_equiv", "last_boxed_only_string", "remove_boxed", "strip_string"]


def last_boxed_only_string(string: str) -> str | None:
    r"""The last `\boxed{...}` or `\fbox{...}` with its command, as `\boxed{...}`; None without one."""
    content = last_boxed(string)
    return None if content is None else rf"\boxed{{{content}}}"


def remove_boxed(s: str) -> str:
    r"""The content of a text that is one `\boxed{...}`; ValueError for another text."""
    content = last_boxed(s) if s.startswith((r"\boxed", r"\fbox")) else None
    if content is None:
        raise ValueError(rf"{s!r:.80} is no \boxed{{...}}; last_boxed_only_string returns one")
    return content


def strip_string(string: str) -> str:
    """The normal form of an answer."""
    return normal_form(string).text


def is_equiv(str1: str | None, str2: str | None, verbose: bool = False) -> bool:
    """Whether two answers are equal; two that are None are, one is not."""
    del verbose
    if str1 is None or str2 is None:
        return str1 is str2
    return bool(is_equal(str1, str2))
