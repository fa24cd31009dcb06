"""Stacks that faulthandler has written: where a rank is, and whether it waits there for others."""

import itertools
import linecache
import re
import sysconfig
from dataclasses import dataclass
from pathlib import PurePath

_THREAD = re.compile(r"^(Current thread|Thread) .*:$", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_SERVERS = ("verl/runtime/rank_server.py", "verl/runtime/ray_rank.py")  # outside of calls
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), "<")
_STORES = ("verl/trainer/run/checkpoints.py", "verl/workers/engine/checkpoint.py", "verl/observe/tracking.py")
_SYNC = re.compile(r"\bf(data)?sync\w*\(|\bos\.sync\(")
_PACKAGE = str(PurePath(__file__).parents[1])  # which may be installed among the libraries
_INNERMOST = 6  # frames between a collective's own code and where its thread waits
_SHOWN = 12  # frames


@dataclass(frozen=True)
class Frame:
    """A function that is running."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self.file}:{self.line} in {self.function}()" + (f": {source}" if source else "")


@dataclass(frozen=True)
class Stack:
    """The frames of a rank's main thread, the innermost first, and the collective in which any thread is."""

    frames: tuple[Frame, ...] = ()
    collective: str | None = None
    is_storing: bool = False  # whether any thread is in an fsync, or in code of checkpoints or trackers
    on_device: str | None = None  # the collective in which its device is

    @classmethod
    def parse(cls, text: str) -> "Stack":
        """From what faulthandler has written of all threads."""
        _, *parts = _THREAD.split(text)
        threads = [tuple(Frame(file, int(line), name) for file, line, name in _FRAME.findall(p)) for p in parts[1::2]]
        if not threads:
            return cls()
        signalled = parts.index("Current thread") // 2 if "Current thread" in parts else -1  # the main one, if it can
        main = next((thread for thread in threads if any(map(_is_main, thread))), threads[signalled])
        call = itertools.takewhile(lambda frame: not _is_server(frame), main)
        return cls(tuple(call) or main, next(filter(None, map(_collective, threads)), None), any(map(_stores, threads)))

    @property
    def is_idle(self) -> bool:
        """Whether the rank waits for its driver: its event loop has nothing to run."""
        files = [frame.file for frame in self.frames[:2]]
        return len(files) == 2 and files[0].endswith("selectors.py") and files[1].endswith("asyncio/base_events.py")

    @property
    def where(self) -> str:
        """The innermost frame outside of libraries, with its source line."""
        own = (f for f in self.frames if f.file.startswith(_PACKAGE) or not f.file.startswith(_LIBRARIES))
        frame = next(own, self.frames[0] if self.frames else None)
        return "an unknown line" if frame is None else str(frame)

    @property
    def waits_in(self) -> str | None:
        """The collective, if it waits in one."""
        return self.on_device or (self.collective and f"{self.collective}()")

    @property
    def place(self) -> str:
        """The same for ranks in the same collective: their devices', or the line of the call."""
        return self.on_device or self.where

    @property
    def what_it_does(self) -> str:
        """Where it is, and in which collective."""
        return (f"waits in {self.waits_in}" if self.waits_in else "is") + f" at {self.where}"

    def __str__(self) -> str:
        return "\n".join(f"  {frame}" for frame in self.frames[:_SHOWN])


def _collective(thread: tuple[Frame, ...]) -> str | None:
    inner = thread[:_INNERMOST]
    return next((frame.function for frame in inner if frame.file.endswith(_COLLECTIVES)), None)


def _stores(thread: tuple[Frame, ...]) -> bool:
    """Whether its innermost Python line calls fsync or the like, or it is in code of _STORES and in no collective."""
    if thread and _SYNC.search(str(thread[0])):
        return True
    return not _collective(thread) and any(frame.file.endswith(_STORES) for frame in thread)


def _is_main(frame: Frame) -> bool:
    """Whether the thread of this frame is the one that runs calls."""
    return _is_server(frame) and frame.function in ("serve", "_serve", "train")


def _is_server(frame: Frame) -> bool:
    return frame.file.endswith(_SERVERS)
