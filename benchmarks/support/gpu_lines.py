"""Results on their way from the process that measures to the one that watches: lines of its standard output."""

import json
import sys
from typing import Any

MARK = "@@gpu "


def tell(message: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(message) + "\n")
    sys.stdout.flush()


def parse(line: str) -> dict[str, Any] | None:
    """The message of a line; None if it has none."""
    return json.loads(line[len(MARK) :]) if line.startswith(MARK) else None
