"""The interface of a weight transport between trainer and rollout, as vendors' plug-ins implement it, and ours."""

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
    """What ours share: the first rank of the trainer sends buckets of many tensors to every worker of the rollout.

    A transport stays connected from publish to publish, until `finalize`. Trainer ranks but the first only take part
    in producing the weights. `timeout`: seconds one end waits for another before it raises TransportError.
    """

    sends_first: ClassVar[bool] = False  # whether everything is sent before anything is received
    rank = -1  # 0 sends, 1 and more receive

    def __init__(self, bucket_size: int, timeout: float = 300.0):
        self.bucket_size, self.timeout = bucket_size, timeout

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def topology_by_rank(cls, actor_world_size: int, rollout_world_size: int, **common: Any) -> Any:
        """What `build_topology` returns when workers differ in nothing but their rank."""
        ranks = ([0] + [-1] * (actor_world_size - 1), list(range(1, rollout_world_size + 1)))
        return tuple({"rank": r, **{name: [value] * len(r) for name, value in common.items()}} for r in ranks)

    @abstractmethod
    def send_buckets(self, buckets: Iterable[Bucket], dtype: torch.dtype | None, version: int) -> Iterator[Bucket]:
        """Send buckets, floating-point tensors as `dtype`; yields each as it travels, valid until the next is asked."""

    @abstractmethod
    def receive_buckets(self, version: int) -> Iterator[Bucket]:
        """What arrives, in memory that belongs to the receiver."""

    def fail(self, reason: str) -> None:
        """Tell receivers that nothing more will come."""

    def max_bucket_bytes(self) -> int:
        """Bytes of one bucket; there are two, one is filled while the other is read."""
        return max(self.bucket_size // 2, 1)

    async def send_weights(self, weights: NamedTensors, global_steps: int | None = None) -> None:
        for _ in self.send_buckets(buckets(weights, self.max_bucket_bytes()), None, global_steps or 0):
            pass

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        for bucket in self.receive_buckets(global_steps or 0):
            for named in bucket:
                yield named


class CheckpointEngineRegistry:
    """Backend names to transports; a backend whose library is missing is remembered with the reason."""

    BUILTIN: ClassVar[dict[str, str]] = {
        "naive": "shared_memory.SharedMemoryTransport", "nccl": "broadcast.BroadcastTransport",
        "hccl": "broadcast.BroadcastTransport", "gloo": "broadcast.GlooTransport",
        "file": "files.FileTransport",
    }  # fmt: skip
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
        """The transport filed under `backend`: a plug-in's, or ours of that name."""
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
        """An instance of the transport filed under `backend`."""
        return cls.get(backend)(*args, **kwargs)
