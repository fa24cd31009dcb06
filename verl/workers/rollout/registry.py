"""Rollout engines by name: what each needs, where its weights are, how it is built. Loads no heavy library.

    @register_rollout_engine("mine", weights=Weights.COPIED, package="mine")
    def build_mine(inputs: EngineInputs) -> RolloutEngine:
        from my_package.engine import MyEngine  # the library loads when the engine is built

        return MyEngine(inputs.config, inputs.model_path, inputs.eos_token_ids)

in a module that `model.external_lib` names, or in a plug-in.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from verl.config.rollout import RolloutConfig
from verl.utils.errors import PluginError
from verl.utils.registry import Registry

if TYPE_CHECKING:
    from torch import device, nn

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


EngineBuilder = Callable[[EngineInputs], "RolloutEngine"]


@dataclass(frozen=True)
class EngineTraits:
    """Abilities of a rollout engine; keywords of `register_rollout_engine`."""

    joins_server: bool = False  # where `rollout.server.url` names one, so that nothing must be installed here
    graphs_collectives: bool = False  # captures collectives of several devices in graphs
    sleeps_with_weights: bool = False  # asleep, it holds its weights and frees the KV cache alone
    starts_on_nodes: bool = False  # reads `EngineInputs.start_server`: replicas may be on several machines of a cluster
    takes_adapters: bool = False  # an update may bring adapters alone, which it adds to the weights that it has
    # `park` stops it between two tokens, `resume` lets it go on with its KV cache, under new weights too, and
    # `in_flight` says what it has sampled:
    keeps_cache: bool = False
    # its answers to a request begin with what was `sampled` of them; limits, stop strings and penalties see that:
    continues: bool = False


@dataclass(frozen=True)
class RegisteredEngine:
    """A rollout engine that can be chosen by name."""

    name: str
    weights: Weights
    builder: EngineBuilder
    package: str | None
    how_to_install: str
    traits: EngineTraits
    apart: EngineBuilder | None = None
    is_apart: bool = False  # the form with copied weights of one that is in place on the trainer's devices

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


ENGINES: Registry[RegisteredEngine] = Registry("rollout engine")


def register_rollout_engine(
    *names: str,
    weights: Weights,
    package: str | None = None,
    how_to_install: str = "",
    apart: EngineBuilder | None = None,
    **traits: bool,
) -> Callable[[EngineBuilder], EngineBuilder]:
    """Decorator of the function that builds the engine `rollout.name=NAME`; names after the first are aliases.

    `package`: module that must be importable here, or in `rollout.server.python`. `traits` are fields of
    `EngineTraits`. `apart`, of an engine in place, builds its replicas on devices of the rollout's own: one device
    each, with copied weights, by `EngineInputs.start_server`.
    """

    def add(builder: EngineBuilder) -> EngineBuilder:
        way = how_to_install or f"Install it: pip install {package}"
        engine = RegisteredEngine(names[0], Weights(weights), builder, package, way, EngineTraits(**traits), apart)
        for name in names:
            ENGINES.register(name)(engine)
        return builder

    return add


def engines_with(weights: Weights) -> str:
    """The names of all engines with such weights, as text."""
    return " or ".join(sorted({engine.name for engine in map(ENGINES.get, ENGINES) if engine.weights is weights}))


def why_not_trained(name: str) -> str:
    """The message of an engine whose weights are elsewhere."""
    copied, in_place = engines_with(Weights.COPIED), engines_with(Weights.IN_PLACE)
    return (
        f"actor_rollout_ref.rollout.name={name} only generates: weights cannot be pushed to such a server, so it would "
        f"go on answering with the old policy. Train with rollout.name={in_place} or {copied}; use {name} with "
        "`verl generate`"
    )
