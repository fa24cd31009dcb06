"""The interface of training engines, and their registry by model type, backend and device."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl.algorithms.losses import TokenLoss
from verl.config import CheckpointConfig, FSDPOptimizerConfig, HFModelConfig
from verl.config.engine import EngineConfig
from verl.data.batch import Batch
from verl.data.metrics import Metrics
from verl.data.micro_batches import MicroBatching
from verl.models.flops import Speed
from verl.models.head.chosen_tokens import TopLogits
from verl.plugin import load_plugins
from verl.plugin.platform import get_platform
from verl.runtime.group import RankPlace
from verl.utils.errors import ConfigError, PluginError
from verl.utils.suggest import did_you_mean

# Hooks of engines written for the system this one is compatible with. Nothing here calls them, so an override would
# have no effect; registering a class that overrides one is an error.
FOREIGN_HOOKS = frozenset(
    [
        "forward_backward_batch",
        "forward_step",
        "train_batch",
        "infer_batch",
        "prepare_model_inputs",
        "prepare_model_outputs",
        "optimizer_step",
        "optimizer_zero_grad",
        "get_per_tensor_param",
        "get_per_tensor_param_shard",
        "get_per_tensor_param_delta_shard",
        "prime_delta_snapshots",
        "get_data_parallel_size",
        "get_data_parallel_rank",
        "get_data_parallel_group",
        "is_mp_src_rank_with_outputs",
        "save_checkpoint",
        "load_checkpoint",
        "_build_module",
        "_build_lora_module",
        "_build_fsdp_module",
        "_build_optimizer",
        "_build_lr_scheduler",
        "_build_model_optimizer",
        "_init_device_mesh",
    ]
)


@dataclass(frozen=True)
class TrainResult:
    """The metrics and outputs of one `forward_backward`."""

    metrics: Metrics  # names ending in "_loss": sums with loss_weights; the others: means over sampled tokens
    outputs: dict[str, Tensor]  # the loss's model outputs, (T,) detached, in input order


class BaseEngine(ABC):
    """Trains one model. It splits batches into micro-batches itself; results are per token, in batch order.

    Derived classes of vendors may override `initialize` and use `self.model` after calling `super().initialize()`.
    """

    model: nn.Module
    on_sequences: Callable[[int], None] = staticmethod(lambda done: None)  # told how many of a call are computed
    top: TopLogits | None = None  # what the outputs top_ids and top_logprobs hold; None: there are none
    place: RankPlace  # the data of this rank, and whether it returns outputs; every rank its own unless it is set

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: EngineConfig,
        optimizer_config: FSDPOptimizerConfig | None = None,
        checkpoint_config: CheckpointConfig | None = None,
    ):
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config or CheckpointConfig()
        self.place = RankPlace(dist.get_rank() if dist.is_initialized() else 0)

    @abstractmethod
    def initialize(self) -> None:
        """Build `self.model` and, unless the engine only runs forward, `self.optimizer` and `self.lr_scheduler`."""

    def speed(self) -> Speed | None:
        """FLOP counts of the model, and the peak FLOP/s of its ranks; None if the engine counts no FLOPs."""
        return None

    @abstractmethod
    def forward(
        self,
        batch: Batch,
        outputs: Sequence[str] = ("logprobs",),
        micro: MicroBatching | None = None,
        temperature: float = 1.0,
    ) -> dict[str, Tensor]:
        """Each of `outputs` as (T,) float32, 0 where loss_mask is False: logprobs, entropy, sum_pi_squared; values.

        With `top`, also top_ids (int64) and top_logprobs (T, k): the most likely tokens in place of each.
        """

    @abstractmethod
    def forward_backward(
        self, batch: Batch, loss: TokenLoss, micro: MicroBatching | None = None, temperature: float = 1.0
    ) -> TrainResult:
        """Add the gradient of the loss summed over all tokens to the gradient; `micro` does not change the sum."""

    @abstractmethod
    def optim_step(self) -> Metrics:
        """Run one optimiser step and clear the gradient: `grad_norm`, `lr`, `skipped` (1 if it was not finite).

        `updates_lost`, of parameters narrower than float32: the share of sampled updates that rounding swallowed.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule by one training step; return the new learning rate."""

    shares_prompts = False  # whether to compute a shared prompt once where a configuration leaves it open
    can_cast = False  # whether it has `computing_in`

    def computing_in(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        """A context in which it computes in `dtype`, or in a wider one if `dtype` is its own; for forward passes."""
        raise NotImplementedError(f"{type(self).__name__} computes in one dtype only")

    can_keep_weights = False  # whether it has `keep_weights` and `swap_weights`

    def keep_weights(self) -> int:
        """Copy the trained weights of this rank into host memory, over an earlier copy; its size in bytes."""
        raise NotImplementedError(f"{type(self).__name__} keeps no earlier weights; see can_keep_weights")

    def swap_weights(self) -> None:
        """Exchange the trained weights with those that `keep_weights` has copied."""
        raise NotImplementedError(f"{type(self).__name__} keeps no earlier weights; see can_keep_weights")

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of every parameter in the dtype it is trained in; tied ones once."""

    def export_adapters(self, with_base: bool) -> Iterator[tuple[str, Tensor]]:
        """(name in a folder of adapters, full tensor), B times its scale, and with the base weights. A collective."""
        raise ConfigError(f"{type(self).__name__} has no adapters; leave model.lora_rank at 0 with this engine")

    def disable_adapter(self) -> AbstractContextManager[Any]:
        """A context in which the model runs without its LoRA adapters."""
        raise ConfigError(f"{type(self).__name__} has no adapters; leave model.lora_rank at 0 with this engine")

    @abstractmethod
    def save(self, folder: Path, contents: Sequence[str] | None = None) -> None:
        """Write `contents` (model, optimizer, extra, hf_model; default: checkpoint.save_contents) into `folder`."""

    def finish_save(self, wait: bool = True) -> bool:
        """True once no background save is running. A collective; raises the error of a failed save."""
        return True

    @abstractmethod
    def load(self, folder: Path, contents: Sequence[str] | None = None) -> None:
        """Restore `contents` (default: checkpoint.load_contents) from `folder`, bit for bit."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimiser state to a torch device, or to "device", the engine's own."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[Any]:
        """A context in which the engine can train; tensors configured for offloading are offloaded on exit."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[Any]:
        """A context in which the engine can run forward; tensors configured for offloading are offloaded on exit."""


# A device, for all its vendors, or (device, vendor). Tests of published plug-ins look engines up by these keys.
EngineKey = str | tuple[str, str]


class EngineRegistry:
    """Engine classes by model type, backend and device, or (device, vendor) for one vendor's own."""

    _engines: dict[str, dict[str, dict[EngineKey, type[BaseEngine]]]] = {}  # noqa: RUF012

    @classmethod
    def register(
        cls,
        model_type: str,
        backend: str | list[str],
        device: str | list[str] = "cuda",
        vendor: str | list[str] | None = None,
    ) -> Callable[[type[BaseEngine]], type[BaseEngine]]:
        """Decorator that registers an engine class under each combination."""

        def add(engine: type[BaseEngine]) -> type[BaseEngine]:
            _check_engine_class(engine)
            for name, device_name, vendor_name in product(_as_list(backend), _as_list(device), _as_list(vendor)):
                engines = cls._engines.setdefault(model_type, {}).setdefault(name, {})
                key = device_name if vendor_name is None else (device_name, vendor_name)
                existing = engines.get(key)
                if existing is not None and existing is not engine:
                    raise PluginError(
                        f"engine {engine.__module__}.{engine.__qualname__} registers model_type={model_type!r} "
                        f"backend={name!r} device={device_name!r} vendor={vendor_name!r}, which is taken by "
                        f"{existing.__module__}.{existing.__qualname__}; register it for another device or vendor"
                    )
                engines[key] = engine
            return engine

        return add

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type[BaseEngine]:
        """The engine for this hardware: its vendor's own, else the device's, else NVIDIA's for other CUDA chips."""
        _register_own_engines()
        load_plugins()
        device, vendor = _device_and_vendor()
        backends = cls._engines.get(model_type)
        if backends is None:
            raise ConfigError(f"no engine for model type {model_type!r}; {did_you_mean(model_type, cls._engines)}")
        if backend not in backends:
            raise ConfigError(f"no engine named {backend!r}; {did_you_mean(backend, backends)}")
        engines = backends[backend]
        keys: list[EngineKey] = [(device, vendor), device]
        if device == "cuda" and vendor != "nvidia":
            keys.append(("cuda", "nvidia"))
        for key in keys:
            if key in engines:
                return engines[key]
        known = ", ".join(key if isinstance(key, str) else " of ".join(key) for key in engines)
        raise ConfigError(
            f"engine {backend!r} for {model_type} does not run on device {device!r} of vendor {vendor!r}; it runs on: "
            f"{known}. Choose another strategy, or install a plug-in that registers one for this device"
        )

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> BaseEngine:
        """An engine of `get_engine_cls`, built from (model, engine, optimizer, checkpoint) configurations."""
        return cls.get_engine_cls(model_type, backend)(*args, **kwargs)


def _device_and_vendor() -> tuple[str, str]:
    platform = get_platform()
    device = os.environ.get("VERL_ENGINE_DEVICE") or platform.device_name
    vendor = os.environ.get("VERL_ENGINE_VENDOR") or platform.vendor_name
    return device, vendor


def _register_own_engines() -> None:
    """Import them by name: a class that engines derive from cannot import them."""
    import_module("verl.workers.engine.fsdp_engine")


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_engine_class(engine: type) -> None:
    if not (isinstance(engine, type) and issubclass(engine, BaseEngine)):
        raise PluginError(f"{engine!r} is not a subclass of verl.workers.engine.base.BaseEngine")
    for owner in engine.__mro__:
        ignored = sorted(FOREIGN_HOOKS & owner.__dict__.keys())
        if ignored:
            raise PluginError(
                f"engine {owner.__module__}.{owner.__qualname__} overrides {', '.join(ignored)}, which this "
                "version never calls: the override would be ignored. Derived engines can rely on the constructor, "
                "initialize() and self.model; put other changes into forward, forward_backward or optim_step"
            )
