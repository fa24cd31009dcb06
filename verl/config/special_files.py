"""Pipes and devices where a file is expected, which nothing waits for."""

import contextlib
from pathlib import Path

from verl.utils.errors import ConfigError


def refuse_special(path: Path, key: str) -> Path:
    """`path`; ConfigError where it, or what is in the folder that it is, is a pipe or a device: whoever reads one may
    wait for ever. `key`: what named it."""
    with contextlib.suppress(OSError):  # what is not there, or may not be seen, is said by whoever opens it
        for file in (path, *(path.iterdir() if path.is_dir() else ())):
            if file.is_fifo() or file.is_char_device() or file.is_block_device():
                raise ConfigError(f"{key}: {file} is a pipe or a device, which is never waited for; give a file")
    return path
