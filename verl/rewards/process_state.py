"""What user code must leave as it found it: a change of the process is undone after the call and named once."""

import contextlib
import contextvars
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_BLOCKS_DRAWN = 200  # of 624 numbers: what one batch of calls may draw from a generator without being called a seed


@dataclass(frozen=True)
class ProcessState:
    """The parts of a process that user code changes by accident and that later steps depend on."""

    folder: str
    dtype: torch.dtype
    torch_seed: int
    torch_rng: Tensor
    python_rng: Any
    numpy_rng: Any
    streams: tuple[Any, Any]  # sys.stdout, sys.stderr
    copies: tuple[int | None, int | None]  # duplicates of file descriptors 1 and 2
    files: tuple[Any, Any]  # behind these two

    @classmethod
    def now(cls) -> "ProcessState":
        """The state of this process, with duplicates of its file descriptors 1 and 2, which `close` closes."""
        return cls(
            os.getcwd(),
            torch.get_default_dtype(),
            torch.initial_seed(),
            torch.get_rng_state(),
            random.getstate(),
            _numpy_state(),
            (sys.stdout, sys.stderr),
            (_duplicate(1), _duplicate(2)),
            (_file_of(1), _file_of(2)),
        )

    def undo_during_calls(self) -> list[str]:
        """Undo what no correct call changes even for a moment; the names of what was changed."""
        changed = []
        if (folder := _folder()) != self.folder:
            os.chdir(self.folder)
            changed.append(f"the working folder (to {folder})")
        if (dtype := torch.get_default_dtype()) != self.dtype:
            torch.set_default_dtype(self.dtype)
            changed.append(f"torch's default dtype (to {dtype})")
        if (seed := torch.initial_seed()) != self.torch_seed:
            torch.set_rng_state(self.torch_rng)
            changed.append(f"torch's seed (to {seed})")
        return changed + [name for number in (1, 2) for name in self._reopen(number)]

    def undo_between_calls(self) -> list[str]:
        """Undo what concurrent calls may change for a moment, or by drawing numbers; the names of what was changed."""
        changed = self.undo_during_calls()
        for name, stream in zip(("stdout", "stderr"), self.streams, strict=True):
            if getattr(sys, name) is not stream and not getattr(stream, "closed", False):
                setattr(sys, name, stream)
                changed.append(f"sys.{name}")
        if is_reseeded(self.python_rng[1][:-1], random.getstate()[1][:-1]):
            random.setstate(self.python_rng)
            changed.append("the seed of `random`")
        if is_reseeded(self.numpy_rng[1].tolist(), _numpy_state()[1].tolist()):
            np.random.set_state(self.numpy_rng)
            changed.append("the seed of `numpy.random`")
        return changed

    def _reopen(self, number: int) -> list[str]:
        """File descriptor 1 or 2 and its stream, open again where user code closed them."""
        name, copy = ("stdout", "stderr")[number - 1], self.copies[number - 1]
        stream, closed = getattr(sys, name), False
        if copy is not None and _file_of(number) != self.files[number - 1]:
            os.dup2(copy, number)
            closed = True
        if stream is not None and getattr(stream, "closed", False):
            original = self.streams[number - 1]
            usable = original is not None and not getattr(original, "closed", False)
            setattr(sys, name, original if usable else open(number, "w", buffering=1, closefd=False))  # noqa: SIM115
            closed = True
        return [f"{name} (closed it)"] if closed else []

    def close(self) -> None:
        for copy in self.copies:
            if copy is not None:
                os.close(copy)


def is_reseeded(before: Any, after: Any) -> bool:
    """Whether a Mersenne Twister with the 624 words `before` has other words now than drawing numbers gives it."""
    before, after = tuple(before), tuple(after)
    if before == after:
        return False
    generator = random.Random()
    generator.setstate((3, (*before, 624), None))
    for _ in range(MAX_BLOCKS_DRAWN):
        generator.getrandbits(32)  # the first of a block, which makes the next 624 words
        words = generator.getstate()[1][:-1]
        if words == after:
            return False
        generator.setstate((3, (*words, 624), None))
    return True


@dataclass(frozen=True)
class _HeldGuards:
    stack: contextlib.ExitStack
    guards: "set[ProcessGuard]"


_held_guards: contextvars.ContextVar[_HeldGuards | None] = contextvars.ContextVar("held_guards", default=None)


@contextlib.contextmanager
def one_batch() -> Iterator[None]:
    """All batches of a guard inside, also those of tasks started here, are one: to read the generators of `random` and
    numpy costs more than many short calls."""
    with contextlib.ExitStack() as stack:
        token = _held_guards.set(_HeldGuards(stack, set()))
        try:
            yield
        finally:
            _held_guards.reset(token)


class ProcessGuard:
    """Undoes what calls of `name` change in the process and names each kind of change once."""

    def __init__(self, name: str):
        self.name = name
        self.named: set[str] = set()
        self._lock = threading.Lock()
        self._state: ProcessState | None = None
        self._num_batches = 0

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Calls run inside, also of several batches at once; the state before the first is the one to keep.

        Inside `one_batch` the batch ends with it.
        """
        held = _held_guards.get()
        if held is None:
            with self._opened():
                yield
        else:
            if self not in held.guards:
                held.guards.add(self)
                held.stack.enter_context(self._opened())
            yield

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        with self._lock:
            self._num_batches += 1
            self._state = self._state or ProcessState.now()
        try:
            yield
        finally:
            with self._lock:
                self._num_batches -= 1
                if self._num_batches == 0 and self._state is not None:
                    state, self._state = self._state, None
                    self.report(state.undo_between_calls())
                    state.close()

    def call(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """`function(**kwargs)`; what it changed is undone right after it, gradients of this thread too."""
        gradients = torch.is_grad_enabled()
        try:
            return function(**kwargs)
        finally:
            changed = [f"torch.set_grad_enabled (to {not gradients})"] * (torch.is_grad_enabled() != gradients)
            torch.set_grad_enabled(gradients)
            with self._lock:
                self.report(changed + (self._state.undo_during_calls() if self._state else []))

    @contextlib.contextmanager
    def importing(self) -> Iterator[None]:
        """User code is imported inside, in this thread, where it may also set signal handlers."""
        gradients, handlers = torch.is_grad_enabled(), {n: signal.getsignal(n) for n in signal.valid_signals()}
        try:
            with self.batch():
                yield
        finally:
            changed = [f"torch.set_grad_enabled (to {not gradients})"] * (torch.is_grad_enabled() != gradients)
            torch.set_grad_enabled(gradients)
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler and handler is not None:
                    signal.signal(number, handler)
                    changed.append(f"the handler of {signal.Signals(number).name}")
            self.report(changed)

    def report(self, changes: list[str]) -> None:
        """Warn of changes whose kind was not named before."""
        new = [change for change in changes if change.partition(" (")[0] not in self.named]
        if new:
            self.named.update(change.partition(" (")[0] for change in new)
            logger.warning(
                "%s changed %s; undone, and not said again: everything else in this process depends on it, so make "
                "the change in a subprocess or undo it yourself",
                self.name,
                " and ".join(new),
            )


def _numpy_state() -> Any:
    return np.random.get_state()


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return "a deleted folder"


def _duplicate(number: int) -> int | None:
    try:
        return os.dup(number)
    except OSError:  # closed before the run
        return None


def _file_of(number: int) -> tuple[int, int] | None:
    """Device and inode of the file that is open under `number`; None: it is closed."""
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino
