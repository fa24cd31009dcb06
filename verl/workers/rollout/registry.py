"""Rollout engines by name: what each needs, where its weights are, how it is built. Loads no heavy library.

    @register_rollout_engine("mine", weights=Weights.COPIED, package="mine")
    def build_mine(inputs: EngineInputs) -> RolloutEngine:
        from my_package.engine import MyEngine  # the library loads when the engine is built

        return MyEngine(inputs.config, inputs.model_path, inputs.eos_token_ids)

in a module that `model.external_lib` names, or in a plug-in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from verl.config.rollout import RolloutConfig
from verl.plugin import load_plugins
from verl.utils.errors import ConfigError, PluginError
from verl.utils.external_code import import_external
from verl.utils.registry import Registry
from verl.utils.suggest import closest

if TYPE_CHECKING:
    from torch import device, nn

    from verl.config import ActorRolloutRefConfig
    from verl.workers.rollout.base import RolloutEngine
    from verl.workers.rollout.remote.process import Server


class Weights(StrEnum):
    """Where the weights are that an engine samples from."""

    IN_PLACE = "in_place"  # the trainer's module; with sharded ranks, on each rank a gathered copy of it
    COPIED = "copied"  # the engine's own copy, which every publish replaces: a `CopyingEngine`
    REMOTE = "remote"  # in a server that takes no weights: the engine answers and cannot be trained


@dataclass(frozen=True)
class EngineInputs:
    """The inputs of an engine."""

    config: RolloutConfig
    tokenizer: Any
    eos_token_ids: tuple[int, ...] = ()  # empty for remote weights
    module: "nn.Module | None" = None  # in place: the model that it samples from
    device: "device | str | None" = None  # in place: where it is
    model_path: str = ""  # copied: the folder of the model
    config_overrides: dict[str, Any] = field(default_factory=dict)  # copied: what replaces values of its config.json
    num_replicas: int = 1  # copied: engines that answer together
    devices: tuple[tuple[int, ...], ...] = ()  # copied: of each of them, by index; none: all devices, or none counted
    start_server: "Callable[[int], Server] | None" = None  # copied: of a replica, on the plan's machine and devices

    def devices_of(self, replica: int) -> tuple[int, ...]:
        """The devices that a process of `replica` may see; none: as this process."""
        return self.devices[replica] if self.devices else ()


@dataclass(frozen=True)
class RegisteredEngine:
    """A rollout engine that can be chosen by name."""

    name: str
    weights: Weights
    builder: "Callable[[EngineInputs], RolloutEngine]"
    package: str | None = None
    how_to_install: str = ""
    joins_server: bool = False
    graphs_collectives: bool = False
    sleeps_with_weights: bool = False
    starts_on_nodes: bool = False
    takes_adapters: bool = False
    is_apart: bool = False  # the form with copied weights of one that is in place on the trainer's devices

    @property
    def keeps_cache(self) -> bool:
        return self.name in _KEEP_CACHE

    @property
    def can_train(self) -> bool:
        return self.weights is not Weights.REMOTE

    def build(self, inputs: EngineInputs) -> "RolloutEngine":
        """A new engine; PluginError where it is not of the class that its weights ask for."""
        from verl.workers.rollout.base import CopyingEngine, RolloutEngine

        engine = self.builder(inputs)
        needed = CopyingEngine if self.weights is Weights.COPIED else RolloutEngine
        if not isinstance(engine, needed):
            raise PluginError(
                f"rollout engine {self.name!r} with weights={self.weights} was built as {type(engine).__name__}, which "
                f"does not derive from verl.workers.rollout.base.{needed.__name__}"
            )
        return engine


_ENGINES: Registry[RegisteredEngine] = Registry("rollout engine")
_APART: "dict[str, Callable[[EngineInputs], RolloutEngine]]" = {}  # by name of an engine in place
_KEEP_CACHE: set[str] = set()


def register_rollout_engine(
    *names: str,
    weights: Weights,
    package: str | None = None,
    how_to_install: str = "",
    joins_server: bool = False,
    graphs_collectives: bool = False,
    sleeps_with_weights: bool = False,
    starts_on_nodes: bool = False,
    takes_adapters: bool = False,
) -> "Callable[[Callable[[EngineInputs], RolloutEngine]], Callable[[EngineInputs], RolloutEngine]]":
    """Decorator of the function that builds the engine `rollout.name=NAME`; names after the first are aliases.

    `package`: module that must be importable here, or in `rollout.server.python`; `joins_server`: unless
    `rollout.server.url` names a server. `graphs_collectives`: captures collectives of several devices in graphs.
    `sleeps_with_weights`: asleep, it holds its weights and frees the KV cache alone. `starts_on_nodes`: it reads
    `EngineInputs.start_server`, so that its replicas may be on several machines of a Ray cluster. `takes_adapters`: an
    update may bring adapters alone, which it adds to the weights that it has.
    """

    def add(builder: "Callable[[EngineInputs], RolloutEngine]") -> "Callable[[EngineInputs], RolloutEngine]":
        way = how_to_install or f"Install it: pip install {package}"
        flags = joins_server, graphs_collectives, sleeps_with_weights, starts_on_nodes, takes_adapters
        engine = RegisteredEngine(names[0], Weights(weights), builder, package, way, *flags)
        for name in names:
            _ENGINES.register(name)(engine)
        return builder

    return add


def register_apart(
    name: str,
) -> "Callable[[Callable[[EngineInputs], RolloutEngine]], Callable[[EngineInputs], RolloutEngine]]":
    """Decorator of the function that builds replicas, of one device each and with copied weights, of the engine in
    place `name`, for a rollout with devices of its own. It reads `EngineInputs.start_server`."""

    def add(builder: "Callable[[EngineInputs], RolloutEngine]") -> "Callable[[EngineInputs], RolloutEngine]":
        _APART[name] = builder
        return builder

    return add


def register_keeps_cache(*names: str) -> None:
    """Say of engines that `park` stops them between two tokens, `resume` lets them go on with their KV cache, under new
    weights too, and `in_flight` says what they have sampled."""
    _KEEP_CACHE.update(names)


def find_rollout_engine(name: str, external_lib: str | Sequence[str] | None = None) -> RegisteredEngine:
    """The engine of `rollout.name`; a name that is not known yet loads `model.external_lib` and the plug-ins."""
    import verl.workers.rollout.own_engines  # noqa: F401

    if name not in _ENGINES:
        import_external(external_lib)
        load_plugins()
    if name not in _ENGINES:
        near = "".join(f" (did you mean {known!r}?)" for known in closest(name, _ENGINES, count=1))
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name} is no rollout engine{near}; known: {', '.join(sorted(_ENGINES))}. "
            "One of your own registers itself with verl.workers.rollout.registry.register_rollout_engine in a module "
            "that actor_rollout_ref.model.external_lib names, or in a plug-in"
        )
    return _ENGINES.get(name)


def rollout_engine_of(arr: "ActorRolloutRefConfig") -> RegisteredEngine:
    """The engine of `rollout.name` as a run uses it: on devices of its own, one in place has copied weights there."""
    registered = find_rollout_engine(arr.rollout.name, arr.model.external_lib)
    if registered.name not in _APART or (arr.hybrid_engine and not arr.rollout.nnodes):
        return registered
    return replace(
        registered, weights=Weights.COPIED, builder=_APART[registered.name], starts_on_nodes=True, is_apart=True
    )


def engines_with(weights: Weights) -> str:
    """The names of all engines with such weights, as text."""
    return " or ".join(sorted({engine.name for engine in map(_ENGINES.get, _ENGINES) if engine.weights is weights}))


def why_not_trained(name: str) -> str:
    """The message of an engine whose weights are elsewhere."""
    copied, in_place = engines_with(Weights.COPIED), engines_with(Weights.IN_PLACE)
    return (
        f"actor_rollout_ref.rollout.name={name} only generates: weights cannot be pushed to such a server, so it would "
        f"go on answering with the old policy. Train with rollout.name={in_place} or {copied}; use {name} with "
        "`verl generate`"
    )
