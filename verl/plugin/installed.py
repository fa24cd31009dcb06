"""Which modules and versions are installed, without importing them."""

import importlib.metadata
import importlib.util
import sys


def has_module(name: str) -> bool:
    """Whether `import name` would find something; a dotted name needs its parents to be importable."""
    if sys.modules.get(name) is not None:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def version_of(*distributions: str) -> str | None:
    """The version of the first of `distributions` that is installed, or None."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
