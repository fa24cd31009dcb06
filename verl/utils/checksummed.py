"""JSON files that contain the SHA-256 digest of their content."""

import hashlib
import json
from pathlib import Path
from typing import Any

from verl.utils.paths import atomic_write_text

DIGEST_FIELD = "sha256"


def write_checksummed(path: Path, content: dict[str, Any], indent: int | None = None) -> None:
    """Write `content` and its digest atomically."""
    atomic_write_text(path, json.dumps({**content, DIGEST_FIELD: _digest(content)}, indent=indent) + "\n")


def read_checksummed(path: Path, may_lack_digest: bool = False) -> dict[str, Any]:
    """Content that `write_checksummed` wrote. ValueError, with the problem, for any other file; `may_lack_digest`: but
    for one that an earlier version wrote without."""
    content = json.loads(Path(path).read_bytes())
    if may_lack_digest and isinstance(content, dict) and DIGEST_FIELD not in content:
        return content
    if not isinstance(content, dict) or content.pop(DIGEST_FIELD, None) != _digest(content):
        raise ValueError("its content does not match its digest")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
