"""One run per folder: a lock that the operating system takes back when its holder ends, however it ends."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from verl.utils.errors import ConfigError
from verl.utils.paths import make_writable_folder

LOCK_FILE = "run.lock"
_held: set[int] = set()  # descriptors, closed in forked processes, which would keep the lock of a parent that died


def _close_in_child() -> None:
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def one_run_in(folder: Path | str, key: str) -> Iterator[None]:
    """Hold `folder/run.lock`; ConfigError that names host, process and start of a run that holds it already."""
    path = make_writable_folder(folder, key) / LOCK_FILE
    descriptor = _open_and_lock(path, key)
    _held.add(descriptor)
    try:
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked: whoever waits for the old file finds that it is gone
        _held.discard(descriptor)
        os.close(descriptor)


def _open_and_lock(path: Path, key: str) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be opened ({error}); delete it, or name another {key}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise _in_use(path, key) from error
        except OSError as error:  # a file system without locks
            if _holder_may_run(path):
                os.close(descriptor)
                raise _in_use(path, key) from error
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)  # its holder ended and deleted it meanwhile


def _holder(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _holder_may_run(path: Path) -> bool:
    """Whether the process named in the file runs; True if it is of another host and nobody can say."""
    holder = _holder(path)
    if holder.get("host") == socket.gethostname() and isinstance(pid := holder.get("pid"), int):
        return pid == os.getpid() or Path(f"/proc/{pid}").exists()
    return bool(holder)


class FolderInUseError(ConfigError):
    """A folder that another run holds."""


def _in_use(path: Path, key: str) -> FolderInUseError:
    holder = _holder(path)
    who = "host {}, process {}, since {}".format(*(holder.get(name, "unknown") for name in ("host", "pid", "since")))
    return FolderInUseError(
        f"{key}={path.parent} is in use by another run ({who}); end that run or wait for it, or name another folder. "
        f"If it ended long ago and this file system has no locks, delete {path}"
    )
