"""Paths as users write them; atomic, durable writes: temporary name, fsync, rename, fsync of the folder."""

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path

from verl.utils.errors import ConfigError


def expand_home(path: str | Path, key: str) -> Path:
    """`path` with its `~` or `~name` as a home folder; ConfigError where there is no such user. `key`: what set it."""
    text = os.fspath(path)
    if text.startswith("~") and os.path.expanduser(text) == text:
        user = text[1:].split("/")[0]
        raise ConfigError(f"{key}={text}: there is no user {user!r} with a home folder; write the path in full")
    return Path(text).expanduser()


def fsync_dir(path: Path) -> None:
    """Make renames inside folder `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_file(path: Path) -> None:
    """Flush a file that another library wrote to disk."""
    fsync_dir(path)


def make_writable_folder(folder: Path | str, key: str) -> Path:
    """The folder that a configuration key names, made if it is missing; ConfigError unless a file can be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{key}={folder} cannot be written to ({error}); name another folder") from error
    return Path(folder)


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
    """Flush every file in `temporary` to disk, then rename it to `target`, replacing an old one."""
    for folder, _, names in os.walk(temporary):
        for name in names:
            fsync_file(Path(folder) / name)
        fsync_dir(Path(folder))
    if target.exists():
        old = target.with_name(f".{target.name}.{uuid.uuid4().hex}.old.tmp")
        os.rename(target, old)
        os.rename(temporary, target)
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    else:
        os.rename(temporary, target)
    fsync_dir(target.parent)


def model_name(folder: Path) -> str:
    """A name for the model in `folder`: of the experiment and step where it is part of a checkpoint, else the folder's.

    `checkpoints/project/experiment/global_step_5/actor/huggingface` is `experiment-step-5`.
    """
    path = expand_home(folder, "model.path").absolute()
    while path.name in ("huggingface", "actor", "critic") and path.parent != path:
        path = path.parent
    if step := re.fullmatch(r"global_step_(\d+)", path.name):
        return f"{path.parent.name or 'model'}-step-{step[1]}"
    return path.name or "model"


def remove_leftovers(folder: Path, prefixes: Sequence[str]) -> None:
    """Delete the unfinished (temporary) files and folders in `folder` of what is called `prefixes`…"""
    for prefix in prefixes:
        for path in Path(folder).glob(f".{prefix}*.tmp"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
