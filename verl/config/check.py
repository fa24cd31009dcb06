"""Combinations that cannot work, and features that are still to come."""

from typing import Any


def check(config: Any) -> None:
    """ConfigError, with the numbers, for a combination of values that cannot work."""
