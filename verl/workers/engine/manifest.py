"""The manifest of an engine checkpoint, and checks of its files against it."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from verl.models.tensor_file import file_digest
from verl.utils.checksummed import read_checksummed
from verl.utils.cores import num_cores
from verl.utils.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 2
HUGGINGFACE = "huggingface"


class DamagedCheckpointError(CheckpointError):
    """A checkpoint that is incomplete, or whose bytes have changed since it was written."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; an error if the save never finished or the format is unknown."""
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
    """Raises DamagedCheckpointError if a file is missing or its bytes have changed."""
    path, expected = folder / name, manifest["files"].get(name)
    if expected is None or not path.is_file():
        raise DamagedCheckpointError(f"{path} is missing; the checkpoint is incomplete, use another one")
    digest = file_digest(path)
    if digest != expected:
        raise DamagedCheckpointError(
            f"{path} is damaged: its sha256 is {digest[:16]}…, the manifest says {expected[:16]}…; use another "
            "checkpoint"
        )


def verify_files(folder: Path, names: Sequence[str], manifest: dict[str, Any]) -> None:
    """`verify_file` on all `names`, several at a time; raises the error of the first bad file."""
    check: Callable[[str], None] = lambda name: verify_file(folder, name, manifest)  # noqa: E731
    with ThreadPoolExecutor(max_workers=min(8, num_cores())) as threads:
        list(threads.map(check, names))


def verify_folder(folder: Path) -> list[str]:
    """Raises DamagedCheckpointError if a file that `load` reads is missing or damaged; returns `export_damage`."""
    manifest = read_manifest(folder)
    verify_files(folder, [name for name in manifest["files"] if "/" not in name], manifest)
    return export_damage(folder, manifest)


def export_damage(folder: Path, manifest: dict[str, Any]) -> list[str]:
    """One sentence per file of the Hugging Face and adapter folders that is missing or damaged.

    No run reads these files. A folder that was taken away as a whole counts as one file.
    """
    found = []
    for name in sorted(name for name in manifest["files"] if "/" in name):
        try:
            if (folder / name).parent.is_dir():
                verify_file(folder, name, manifest)
            else:
                found.append(f"{(folder / name).parent} is missing")
        except (OSError, DamagedCheckpointError) as error:
            found.append(str(error).partition(";")[0])
    return list(dict.fromkeys(found))
