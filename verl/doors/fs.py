"""A local path of a file or folder that may be in HDFS, where published code imports it."""

import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from verl.utils import hadoop


def is_non_local(path: str) -> bool:
    """Whether `path` is in HDFS."""
    return hadoop.is_hdfs(path)


def copy_to_local(
    src: str,
    cache_dir: str | None = None,
    filelock: str = ".file.lock",
    verbose: bool = False,
    always_recopy: bool = False,
    use_shm: bool = False,
) -> str:
    """A local path with the content of `src`: `src` itself, or for an hdfs:// path its copy in `cache_dir`.

    Without `cache_dir` it is in a folder of this user alone; PermissionError where that one is somebody else's. A copy
    that is there is used again, unless `always_recopy`. `filelock` and `use_shm` have no effect: a copy gets its name
    when it is complete, and what maps a file into memory shares it with the other processes.
    """
    del filelock, use_shm
    if not hadoop.is_hdfs(src):
        return src
    folder = (Path(cache_dir) if cache_dir else _folder_of_user()) / hashlib.sha256(src.encode()).hexdigest()[:16]
    target = folder / src.rstrip("/").rpartition("/")[2]
    if always_recopy or not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as unfinished:
            copied = Path(hadoop.copy(src, str(Path(unfinished) / target.name)))
            if target.is_dir():
                target.rename(Path(unfinished) / "replaced")
            copied.rename(target)
        if verbose:
            print(f"copied {src} to {target}")
    return str(target)


def _folder_of_user() -> Path:
    folder, user = Path(tempfile.gettempdir()) / f"verl-{os.getuid()}", os.getuid()
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()  # not stat: a link may point anywhere
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        seen = f"{folder} is {stat.filemode(found.st_mode)} of user {found.st_uid}"
        raise PermissionError(f"{seen}; it must be a folder, drwx------ of user {user}: remove it, or pass cache_dir")
    return folder


def local_mkdir_safe(path: str, **_: Any) -> str:
    """Make the folder `path` and its parents; returns `path`."""
    Path(path).mkdir(parents=True, exist_ok=True)
    return path


copy_local_path_from_hdfs = copy_to_local
