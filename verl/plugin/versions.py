"""Compare version strings as vendors write them: "12.8", "7.0.51831-a3b", "25.3.rc1", "0.11.1.dev3+gabc"."""

import re

from packaging.version import VERSION_PATTERN, Version

_VERSION = re.compile(VERSION_PATTERN, re.VERBOSE | re.IGNORECASE)


def version_key(text: str) -> Version:
    """The version at the start of `text`; a local part ("+gabc") and anything after a dash are ignored."""
    match = _VERSION.match(re.split("[+-]", text.strip(), maxsplit=1)[0])
    if match is None:
        raise ValueError(f"no version number at the start of {text!r}")
    return Version(match.group())


def at_least(version: str | None, minimum: str) -> bool:
    """Whether `version` is known and not older than `minimum`."""
    return version is not None and version_key(version) >= version_key(minimum)


def newer_than(version: str | None, limit: str) -> bool:
    """Whether `version` is known and strictly newer than `limit`."""
    return version is not None and version_key(version) > version_key(limit)
