"""Spans of a conversation, one inside the other, and the span in progress.

Without a conversation that is traced, `span` yields None and records nothing.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

CONVERSATION, GENERATION, TOOL, REWARD, CALL = "conversation", "generation", "tool", "reward", "call"
TOKEN_IDS, LOGPROBS = "token_ids", "logprobs"  # outputs of a generation


@dataclass
class Span:
    """Something that took time; times are in ns since the epoch. `error` is empty where it went well."""

    name: str
    kind: str = CALL
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    start_ns: int = field(default_factory=time.time_ns)
    end_ns: int = 0
    error: str = ""
    children: list["Span"] = field(default_factory=list)

    def end(self, error: BaseException | None = None) -> None:
        """It ends now; `error` is what ended it, if something did."""
        self.end_ns = time.time_ns()
        if error is not None:
            self.error = f"{type(error).__name__}: {error}"

    def note(
        self,
        inputs: dict[str, Any] | None = None,
        outputs: dict[str, Any] | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        """Replaces the inputs and the outputs where they are given; adds `attributes`."""
        self.inputs = self.inputs if inputs is None else inputs
        self.outputs = self.outputs if outputs is None else outputs
        self.attributes |= attributes or {}

    def walk(self) -> Iterator["Span"]:
        """This span and all below it, each before those inside it."""
        yield self
        for child in self.children:
            yield from child.walk()


_current: ContextVar[Span | None] = ContextVar("current_span", default=None)


def current_span() -> Span | None:
    """The innermost span in progress here; None where nothing is traced."""
    return _current.get()


@contextmanager
def inside(span: Span | None) -> Iterator[None]:
    """`span` is the one in progress; None: nothing below is traced."""
    token = _current.set(span)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def span(name: str, kind: str = CALL, **inputs: Any) -> Iterator[Span | None]:
    """A span inside the one in progress, which the block may fill; None where nothing is traced."""
    parent = _current.get()
    if parent is None:
        yield None
        return
    child = Span(name, kind, inputs)
    parent.children.append(child)
    with ended(child):
        yield child


@contextmanager
def ended(span: Span) -> Iterator[None]:
    """`span` is in progress and ends with the block; what is raised is noted in it."""
    with inside(span):
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            span.end(error)
            raise
    span.end()
