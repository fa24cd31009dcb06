"""Files in HDFS or on this machine: `copy`, `makedirs`, `exists`, `remove`, `rename`.

A local path goes to Python's own functions; an `hdfs://` path needs the `hdfs` command.
"""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from verl.utils.errors import DataError

HDFS_PREFIX = "hdfs://"
_TIMEOUT_S = 3600  # of one command


def is_hdfs(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is in HDFS."""
    return os.fspath(path).startswith(HDFS_PREFIX)


def exists(path: str, **kwargs: Any) -> bool:
    """Whether there is a file or folder at `path`."""
    del kwargs
    if not is_hdfs(path):
        return os.path.exists(path)
    return _run_hdfs("-test", "-e", path).returncode == 0


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Make the folder `name` and its parents; FileExistsError when it is there, unless `exist_ok`."""
    del kwargs
    if not is_hdfs(name):
        return os.makedirs(name, mode=mode, exist_ok=exist_ok)
    if exists(name):
        if not exist_ok:
            raise FileExistsError(f"{name} exists; pass exist_ok=True to keep it")
        return None
    return _require_success(_run_hdfs("-mkdir", "-p", name))


def copy(src: str, dst: str, **kwargs: Any) -> str:
    """Copy a file, or a folder with its content; returns the copy's path. Either side may be in HDFS.

    On this machine a file is copied as `shutil.copy` does, a folder as `shutil.copytree` (which takes `kwargs`).
    """
    if not is_hdfs(src) and not is_hdfs(dst):
        return str(shutil.copytree(src, dst, **kwargs) if os.path.isdir(src) else shutil.copy(src, dst, **kwargs))
    verb = "-cp" if is_hdfs(src) and is_hdfs(dst) else "-put" if is_hdfs(dst) else "-get"
    _require_success(_run_hdfs(verb, "-f", os.fspath(src), os.fspath(dst)))
    return dst


def remove(path: str) -> None:
    """Delete the file or folder at `path`, if there is one."""
    if is_hdfs(path):
        return _require_success(_run_hdfs("-rm", "-r", "-f", path))
    if os.path.isdir(path):
        return shutil.rmtree(path)
    return Path(path).unlink(missing_ok=True)


def rename(path: str, new: str) -> None:
    """Give the file or folder at `path` the path `new` in the same file system, where nothing is yet."""
    _require_success(_run_hdfs("-mv", path, new)) if is_hdfs(path) else os.rename(path, new)


def _run_hdfs(*arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["hdfs", "dfs", *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise DataError(
            f"{arguments[-1]}: hdfs:// paths need the command `hdfs`, and there is none in PATH; install Hadoop's "
            "client, or use a local folder"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DataError(f"`hdfs dfs {' '.join(arguments)}` did not end within {_TIMEOUT_S} s") from error


def _require_success(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        message = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise DataError(f"`{' '.join(done.args)}` failed: {message}")
