"""Compare version strings as vendors write them: "12.8", "7.0.51831-a3b", "25.3.rc1", "0.11.1.dev3+gabc"."""

import re

_PRE_RELEASE = {"dev": -4, "alpha": -3, "a": -3, "beta": -2, "b": -2, "rc": -1, "c": -1}
_FINAL = 0


def version_key(text: str) -> tuple[tuple[int, ...], int, int]:
    """A key that sorts versions: release numbers, then pre-release kind (none is last), then its number.

    A local part ("+gabc") and anything after a dash are ignored.
    """
    text = re.split(r"[+-]", text.strip().lower().lstrip("v"), maxsplit=1)[0]
    release = re.match(r"\d+(\.\d+)*", text)
    if release is None:
        raise ValueError(f"no version number at the start of {text!r}")
    numbers = [int(part) for part in release.group().split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    pre_release = re.match(r"[._]?(dev|alpha|beta|rc|a|b|c)\.?(\d*)", text[release.end() :])
    if pre_release is None:
        return tuple(numbers), _FINAL, 0
    return tuple(numbers), _PRE_RELEASE[pre_release.group(1)], int(pre_release.group(2) or 0)


def at_least(version: str | None, minimum: str) -> bool:
    """Whether `version` is known and not older than `minimum`."""
    return version is not None and version_key(version) >= version_key(minimum)


def newer_than(version: str | None, limit: str) -> bool:
    """Whether `version` is known and strictly newer than `limit`."""
    return version is not None and version_key(version) > version_key(limit)
