"""Traces of agent loops, where published loops import them.

Inside a conversation that `rollout.trace.backend` records, decorated methods are spans of its trace. Elsewhere
`RolloutTraceConfig.init` names a backend, and each block of `rollout_trace_attr` is a trace. Otherwise nothing is
recorded, and a loop is as it was.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from verl.observe.tracing.backends import TRACE_BACKENDS, check_trace_backend
from verl.observe.tracing.spans import CONVERSATION, Span, current_span, ended, inside, span
from verl.observe.tracing.writer import TraceWriter
from verl.observe.trackers import RunInfo
from verl.utils.errors import ConfigError
from verl.utils.suggest import did_you_mean

F = TypeVar("F", bound=Callable[..., Any])
logger = logging.getLogger(__name__)


def rollout_trace_op(func: F) -> F:
    """Decorator of a method or function, also an async one: a call inside a trace is a span with arguments and result.

    Outside a trace the call is as without the decorator.
    """
    signature = inspect.signature(func)

    def given(args: Any, kwargs: Any) -> dict[str, Any]:
        try:
            arguments = dict(signature.bind(*args, **kwargs).arguments)
        except TypeError:  # the call says so
            return {}
        arguments.pop("self", None)
        return arguments

    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def traced(*args: Any, **kwargs: Any) -> Any:
            if current_span() is None:
                return await func(*args, **kwargs)
            with span(func.__qualname__) as call:
                _set(call, "inputs", given(args, kwargs))
                result = await func(*args, **kwargs)
                _set(call, "outputs", {"result": result})
            return result

    else:

        @functools.wraps(func)
        def traced(*args: Any, **kwargs: Any) -> Any:
            if current_span() is None:
                return func(*args, **kwargs)
            with span(func.__qualname__) as call:
                _set(call, "inputs", given(args, kwargs))
                result = func(*args, **kwargs)
                _set(call, "outputs", {"result": result})
            return result

    return traced  # type: ignore[return-value]


@contextmanager
def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """Attributes of the trace in progress; where there is none, the block is one. `trace=False`: nothing is traced."""
    given = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n, "validate": validate}
    attributes = {key: value for key, value in given.items() if value is not None}
    around, writer = current_span(), RolloutTraceConfig.writer
    if not trace or (around is None and writer is None):
        with inside(None):
            yield
        return
    if around is not None:
        around.attributes |= {key: value for key, value in attributes.items() if key not in around.attributes}
        yield
        return
    root = Span(name, CONVERSATION, attributes=attributes)
    try:
        with ended(root):
            yield
    finally:
        assert writer is not None
        writer.put(root)


class RolloutTraceConfig:
    """The backend of traces outside a run; those of a run are configured by `rollout.trace`."""

    writer: TraceWriter | None = None
    token2text = False

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None = None,
        token2text: bool = False,
        *_: Any,
        **__: Any,
    ) -> None:
        """ConfigError for a backend that is unknown or not installed; None records nothing."""
        cls.reset()
        if backend is None:
            return
        if backend not in TRACE_BACKENDS:
            raise ConfigError(f"rollout.trace.backend={backend!r} is unknown; {did_you_mean(backend, TRACE_BACKENDS)}")
        check_trace_backend(backend)
        run = RunInfo(project_name, experiment_name)
        cls.writer, cls.token2text = TraceWriter(backend, TRACE_BACKENDS[backend], run, logger.warning), token2text

    @classmethod
    def get_instance(cls) -> "RolloutTraceConfig":
        """The one configuration of the process."""
        return cls()

    @classmethod
    def get_backend(cls) -> str | None:
        """The name of the backend, or None."""
        return cls.writer.name if cls.writer is not None else None

    @classmethod
    def get_client(cls) -> None:
        """The backend's client: None, as a thread of its own has it."""

    @classmethod
    def enable_token2text(cls) -> bool:
        """Whether traces hold the text of tokens."""
        return cls.token2text

    @classmethod
    def reset(cls) -> None:
        """Write what is under way; nothing is recorded from here on."""
        writer, cls.writer, cls.token2text = cls.writer, None, False
        if writer is not None:
            writer.close()


def _set(call: Span | None, name: str, value: dict[str, Any]) -> None:
    if call is not None:
        setattr(call, name, value)
