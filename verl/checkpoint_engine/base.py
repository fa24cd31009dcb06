"""The interface of weight transports between trainer and rollout; vendors' plug-ins and our transports implement it."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from typing import Any, ClassVar, TypedDict, TypeVar

import torch

from verl.checkpoint_engine.buckets import buckets
from verl.utils.errors import PluginError
from verl.utils.suggest import did_you_mean

EngineClass = TypeVar("EngineClass", bound="type[CheckpointEngine]")
NamedTensors = Generator[tuple[str, torch.Tensor], None, None]
Bucket = list[tuple[str, torch.Tensor]]


class TensorMeta(TypedDict):
    """Position of one tensor in a bucket; `offset` in bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int


class CheckpointEngine(ABC):
    """Sends the trainer's weights and receives them in rollout workers.

    Order of calls: `prepare` on every worker, `build_topology` once on the driver with what they returned,
    `init_process_group` on every worker, then `send_weights` and `receive_weights` at the same time, `finalize`.
    """

    wire_format: ClassVar[str] = "named_tensors"

    @abstractmethod
    def prepare(self) -> dict[str, Any]:
        """Allocate buffers; returns metadata of this worker for the others."""

    @classmethod
    @abstractmethod
    def build_topology(
        cls, actor_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Arguments of `init_process_group`, one list entry per worker: the actor's, then the rollout's."""

    @abstractmethod
    def init_process_group(self, *args: Any, **kwargs: Any) -> None:
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


class BucketTransport(CheckpointEngine):
    """Base of our transports: rank 0 of the trainer sends buckets of many tensors to every rollout worker, or several
    ranks to some of them each.

    A transport stays connected between publishes, until `finalize`. The other trainer ranks only take part in
    producing the weights. `timeout`: seconds one endpoint waits for another before it raises TransportError.
    """

    sends_first: ClassVar[bool] = False  # whether everything is sent before anything is received
    rank = -1  # 0 sends, 1 and more receive

    def __init__(self, bucket_size: int, timeout: float = 300.0):
        self.bucket_size, self.timeout = bucket_size, timeout

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def topology_by_rank(cls, actor_world_size: int, rollout_world_size: int, **common: Any) -> Any:
        """Result of `build_topology` when workers differ only in their rank."""
        ranks = ([0] + [-1] * (actor_world_size - 1), list(range(1, rollout_world_size + 1)))
        return tuple({"rank": r, **{name: [value] * len(r) for name, value in common.items()}} for r in ranks)

    @abstractmethod
    def send_buckets(self, buckets: Iterable[Bucket], dtype: torch.dtype | None, version: int) -> Iterator[Bucket]:
        """Send buckets, floating-point tensors as `dtype`; yields each bucket as sent, valid until the next one."""

    @abstractmethod
    def receive_buckets(self, version: int) -> Iterator[Bucket]:
        """Received buckets, in memory that the receiver owns."""

    def fail(self, reason: str) -> None:
        """Notify the receivers that no more weights will come."""

    def max_bucket_bytes(self) -> int:
        """Bytes of one of two buckets: one is filled while the other is read."""
        return max(self.bucket_size // 2, 1)

    async def send_weights(self, weights: NamedTensors, global_steps: int | None = None) -> None:
        for _ in self.send_buckets(buckets(weights, self.max_bucket_bytes()), None, global_steps or 0):
            pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        for bucket in self.receive_buckets(global_steps or 0):
            for named in bucket:
                yield named


class CheckpointEngineRegistry:
    """Maps backend names to transports; remembers why a backend cannot be imported."""

    BUILTIN: ClassVar[dict[str, str]] = {
        "naive": "shared_memory.SharedMemoryTransport", "nccl": "broadcast.BroadcastTransport",
        "hccl": "broadcast.BroadcastTransport", "gloo": "broadcast.GlooTransport",
        "file": "files.FileTransport",
    }  # fmt: skip
    _registry: ClassVar[dict[str, type[CheckpointEngine]]] = {}
    _import_errors: ClassVar[dict[str, BaseException]] = {}

    @classmethod
    def register(cls, backend: str) -> Callable[[EngineClass], EngineClass]:
        """Decorator that registers a transport as `backend`; a vendor may replace one."""

        def add(engine_class: EngineClass) -> EngineClass:
            cls._registry[backend] = engine_class
            return engine_class

        return add

    @classmethod
    def record_import_error(cls, backend: str, error: BaseException) -> None:
        """Remember why `backend` cannot be imported; `get` raises it."""
        cls._import_errors[backend] = error

    @classmethod
    def get(cls, backend: str) -> type[CheckpointEngine]:
        """The transport class of `backend`: a plug-in's, else ours."""
        from verl.plugin import load_plugins

        load_plugins()
        if backend in cls._registry:
            return cls._registry[backend]
        if backend in cls._import_errors:
            error = cls._import_errors[backend]
            raise PluginError(f"checkpoint engine {backend!r} cannot be imported: {error}") from error
        if backend in cls.BUILTIN:
            module, name = cls.BUILTIN[backend].split(".")
            return getattr(importlib.import_module(f"verl.checkpoint_engine.{module}"), name)
        raise PluginError(
            f"unknown checkpoint engine {backend!r}; {did_you_mean(backend, [*cls.BUILTIN, *cls._registry])}; others "
            "come from plug-ins, or from the module that checkpoint_engine.custom_backend_module names"
        )

    @classmethod
    def new(cls, backend: str, *args: Any, **kwargs: Any) -> CheckpointEngine:
        """An instance of the transport registered as `backend`."""
        return cls.get(backend)(*args, **kwargs)
