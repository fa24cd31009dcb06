"""What an engine checkpoint says it holds, and whether its files are what was written."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl.models.tensor_file import file_digest
from verl.utils.checksummed import read_checksummed
from verl.utils.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is incomplete, or whose bytes are not those that were written."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint says it holds; an error when it was never finished or is of an unknown format."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DamagedCheckpointError(
            f"{folder} has no {MANIFEST}: it is no engine checkpoint, or saving it never finished"
        )
    try:
        manifest = read_checksummed(path)
    except ValueError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}; use another checkpoint") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')!r}; this version reads {FORMAT}")
    return manifest


def verify_file(folder: Path, name: str, manifest: dict[str, Any]) -> None:
    """Refuses a file that is missing or whose bytes are not those that were saved."""
    path, expected = folder / name, manifest["files"].get(name)
    if expected is None or not path.is_file():
        raise DamagedCheckpointError(f"{path} is missing; the checkpoint is incomplete, use another one")
    found = file_digest(path)
    if found != expected:
        raise DamagedCheckpointError(
            f"{path} is damaged: its sha256 is {found[:16]}…, the manifest says {expected[:16]}…; use another "
            "checkpoint"
        )


def verify_files(folder: Path, names: Sequence[str], manifest: dict[str, Any]) -> None:
    """`verify_file` of all, several at a time; the error of the first that is bad."""
    check: Callable[[str], None] = lambda name: verify_file(folder, name, manifest)  # noqa: E731
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as threads:
        list(threads.map(check, names))


def verify_folder(folder: Path) -> None:
    """Refuses an engine checkpoint of which a file that `load` reads is missing or damaged."""
    manifest = read_manifest(folder)
    verify_files(folder, [name for name in manifest["files"] if "/" not in name], manifest)
