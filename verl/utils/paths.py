"""Writing that a crash cannot tear: temporary name, fsync, rename, fsync of the folder."""

import os
import shutil
import uuid
from pathlib import Path


def fsync_dir(path: Path) -> None:
    """Make renames inside folder `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Flush a file that another library wrote to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write `data` so that `path` holds either its old content or all of the new."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` for UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8"))


def publish_directory(temporary: Path, target: Path) -> None:
    """Flush every file in `temporary` to disk, then make it `target`, in place of an old one."""
    for folder, _, names in os.walk(temporary):
        for name in names:
            fsync_file(Path(folder) / name)
        fsync_dir(Path(folder))
    if target.exists():
        old = target.with_name(f".{target.name}.{uuid.uuid4().hex}.old.tmp")
        os.rename(target, old)
        os.rename(temporary, target)
        shutil.rmtree(old)
    else:
        os.rename(temporary, target)
    fsync_dir(target.parent)


def remove_leftovers(folder: Path) -> list[Path]:
    """Delete what was left in `folder` under names of unfinished files and folders; returns what was deleted."""
    leftovers = [p for p in Path(folder).glob(".*.tmp")] if Path(folder).is_dir() else []
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return leftovers
