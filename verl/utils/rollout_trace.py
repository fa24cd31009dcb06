"""Traces of agent loops, where published loops import them. No backend exists yet, so nothing is recorded.

`rollout.trace.backend` is refused until then; without a backend these names leave a loop as it is.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from verl.utils.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def rollout_trace_op(func: F) -> F:
    """Decorator of a method whose calls are traced; without a backend, the method itself."""
    return func


@contextmanager
def rollout_trace_attr(
    sample_index: int | None = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """Attributes of the traces inside the block."""
    del sample_index, step, rollout_n, name, validate, trace
    yield


class RolloutTraceConfig:
    """The backend of traces: none."""

    @classmethod
    def init(cls, project_name: str, experiment_name: str, backend: str | None = None, *_: Any, **__: Any) -> None:
        """ConfigError for any backend."""
        del project_name, experiment_name
        if backend is not None:
            raise ConfigError(
                f"rollout.trace.backend={backend}: tracing of trajectories is still to come; leave it null"
            )

    @classmethod
    def get_instance(cls) -> "RolloutTraceConfig":
        """A configuration without a backend."""
        return cls()

    @classmethod
    def get_backend(cls) -> None:
        """The name of the backend: None."""

    @classmethod
    def get_client(cls) -> None:
        """The backend's client: None."""

    @classmethod
    def enable_token2text(cls) -> bool:
        """Whether traces hold the text of tokens."""
        return False

    @classmethod
    def reset(cls) -> None:
        """Nothing is kept, so nothing is reset."""
