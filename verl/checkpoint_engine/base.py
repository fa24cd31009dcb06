"""The interface of a weight transport between trainer and rollout, as vendors' plug-ins implement it."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, ClassVar, TypedDict, TypeVar

import torch

from verl.utils.errors import PluginError
from verl.utils.suggest import did_you_mean

EngineClass = TypeVar("EngineClass", bound="type[CheckpointEngine]")
NamedTensors = Generator[tuple[str, torch.Tensor], None, None]


class TensorMeta(TypedDict):
    """Where one tensor lies in a bucket; `offset` in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int


class CheckpointEngine(ABC):
    """Sends the trainer's weights, receives them in a rollout worker.

    Order of calls: `prepare` on every worker, `build_topology` once on the driver with what they returned,
    `init_process_group` on every worker, then `send_weights` and `receive_weights` at the same time, `finalize`.
    """

    wire_format: ClassVar[str] = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Allocate buffers; returns what the others must know about this worker."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`, one list entry per worker: for the actor's, then for the rollout's."""

    @abstractmethod
    def init_process_group(self, **kwargs: Any) -> None:
        """Connect to the other workers."""

    @abstractmethod
    def finalize(self) -> None:
        """Free buffers and connections."""

    @abstractmethod
    async def send_weights(self, weights: NamedTensors, global_steps: int | None = None) -> None:
        """Send every (name, tensor), in order."""

    @abstractmethod
    def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield every (name, tensor) that the trainer sends."""


class CheckpointEngineRegistry:
    """Backend names to transports; a backend whose library is missing is remembered with the reason."""

    _registry: ClassVar[dict[str, type[CheckpointEngine]]] = {}
    _import_errors: ClassVar[dict[str, BaseException]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[EngineClass], EngineClass]:
        """Decorator that files a transport under `backend`; a vendor may replace one."""

        def add(engine_class: EngineClass) -> EngineClass:
            cls._registry[backend] = engine_class
            return engine_class

        return add

    @classmethod
    def record_import_error(cls, backend: str, error: BaseException) -> None:
        """Remember why `backend` is not there, to say so to whoever asks for it."""
        cls._import_errors[backend] = error

    @classmethod
    def get(cls, backend: str) -> type[CheckpointEngine]:
        """The transport filed under `backend`."""
        from verl.plugin import load_plugins

        load_plugins()
        if backend in cls._registry:
            return cls._registry[backend]
        if backend in cls._import_errors:
            error = cls._import_errors[backend]
            raise PluginError(f"checkpoint engine {backend!r} cannot be imported: {error}") from error
        raise PluginError(f"unknown checkpoint engine {backend!r}; {did_you_mean(backend, cls._registry)}")

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> CheckpointEngine:
        """An instance of the transport filed under `backend`."""
        return cls.get(backend)(*args, **kwargs)
