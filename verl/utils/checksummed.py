"""JSON files that contain the SHA-256 digest of their content."""

import hashlib
import json
from pathlib import Path
from typing import Any

from verl.utils.paths import atomic_write_text

DIGEST_FIELD = "sha256"


def write_checksummed(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and its digest atomically."""
    atomic_write_text(path, json.dumps({**content, DIGEST_FIELD: _digest(content)}) + "\n")


def read_checksummed(path: Path) -> dict[str, Any]:
    """Content that `write_checksummed` wrote. ValueError, with the problem, for any other file."""
    content = json.loads(Path(path).read_bytes())
    if not isinstance(content, dict) or content.pop(DIGEST_FIELD, None) != _digest(content):
        raise ValueError("its content does not match its digest")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
