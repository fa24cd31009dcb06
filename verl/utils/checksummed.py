"""JSON files that carry the digest of their own content."""

import hashlib
import json
from pathlib import Path
from typing import Any

from verl.utils.paths import atomic_write_text

DIGEST_FIELD = "sha256"


def write_checksummed(path: Path, content: dict[str, Any]) -> None:
    """Write `content` and its digest, whole or not at all."""
    atomic_write_text(path, json.dumps({**content, DIGEST_FIELD: _digest(content)}) + "\n")


def read_checksummed(path: Path) -> dict[str, Any]:
    """What `write_checksummed` wrote. ValueError, saying what is wrong, for anything else."""
    content = json.loads(Path(path).read_bytes())
    if not isinstance(content, dict) or content.pop(DIGEST_FIELD, None) != _digest(content):
        raise ValueError("its content is not what its digest says")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
