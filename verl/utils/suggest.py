"""Did-you-mean suggestions for unknown names."""

import difflib
from collections.abc import Iterable

MAX_NAMES_SHOWN = 24  # names that an error lists


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; may be empty. With one that is far more like it, that one alone."""
    near = difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)
    likeness = [difflib.SequenceMatcher(None, candidate, name).ratio() for candidate in near]
    return [candidate for candidate, ratio in zip(near, likeness, strict=True) if ratio > likeness[0] - 0.1]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence for the end of an error message: the closest names, or the known ones when none is close."""
    names = sorted(known)
    near = closest(name, names)
    if near:
        return "did you mean " + " or ".join(repr(n) for n in near) + "?"
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return f"known: {', '.join(names[:MAX_NAMES_SHOWN]) or 'none'}{more}"
