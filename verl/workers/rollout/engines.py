"""The rollout engines by name: this package's own are registered here. Their libraries load when they are built."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from verl.plugin import load_plugins
from verl.utils.errors import ConfigError
from verl.utils.external_code import import_external
from verl.utils.suggest import closest
from verl.workers.rollout.registry import (
    ENGINES,
    EngineInputs,
    RegisteredEngine,
    Weights,
    register_rollout_engine,
)

if TYPE_CHECKING:
    from verl.config import ActorRolloutRefConfig
    from verl.workers.rollout.base import CopyingEngine, RolloutEngine

Engine = TypeVar("Engine", bound="CopyingEngine")


def in_own_processes(inputs: EngineInputs) -> "CopyingEngine":
    """A process per replica, which sees the replica's devices alone; one that is lost is replaced."""
    from verl.workers.rollout.remote.engine import RemoteEngine

    config, path, eos = inputs.config, inputs.model_path, inputs.eos_token_ids

    def start(number: int) -> RemoteEngine:
        server = inputs.start_server(number) if inputs.start_server else None
        return RemoteEngine(config, path, eos, number, inputs.devices_of(number), server)

    shares_devices = bool(inputs.devices) and config.free_cache_engine
    return routed(start_all(start, inputs.num_replicas), start, config.server.max_restarts, shares_devices)


@register_rollout_engine(
    "native", "hf", weights=Weights.IN_PLACE, apart=in_own_processes, keeps_cache=True, continues=True
)
def build_native(inputs: EngineInputs) -> "RolloutEngine":
    """Continuous batching on the trainer's module."""
    from verl.workers.rollout.native.engine import NativeEngine

    assert inputs.module is not None
    return NativeEngine(inputs.config, inputs.module, inputs.tokenizer, inputs.device, inputs.eos_token_ids)


@register_rollout_engine(
    "vllm",
    weights=Weights.COPIED,
    package="vllm",
    how_to_install="Install it: pip install -e '.[vllm]' in a checkout of verl",
    graphs_collectives=True,
    starts_on_nodes=True,
    takes_adapters=True,
    keeps_cache=True,
)
def build_vllm(inputs: EngineInputs) -> "RolloutEngine":
    """vLLM in this process, or in a process per replica, which sees the replica's devices alone."""
    config = inputs.config
    size = config.tensor_model_parallel_size * config.data_parallel_size
    alone = inputs.num_replicas == size == 1 and not inputs.devices
    if alone and config.server.python is None and inputs.start_server is None:
        from verl.workers.rollout.vllm.engine import VLLMEngine

        return VLLMEngine(config, inputs.model_path, inputs.tokenizer, inputs.eos_token_ids)
    return in_own_processes(inputs)


@register_rollout_engine(
    "sglang",
    weights=Weights.COPIED,
    package="sglang",
    how_to_install="Make an environment for it: scripts/install_sglang_server_env.sh",
    joins_server=True,
    graphs_collectives=True,
    sleeps_with_weights=True,
    starts_on_nodes=True,
)
def build_sglang(inputs: EngineInputs) -> "RolloutEngine":
    """SGLang servers, started or joined."""
    from verl.workers.rollout.sglang import SGLangEngine

    config = inputs.config
    if config.server.url is not None and inputs.num_replicas > 1:
        raise ConfigError(
            f"actor_rollout_ref.rollout.server.url names one server, but num_replicas={inputs.num_replicas}; leave out "
            "one of the two"
        )
    if inputs.start_server is not None and config.server.url is None:
        return in_own_processes(inputs)

    def start(number: int) -> SGLangEngine:
        return SGLangEngine(config, inputs.model_path, inputs.eos_token_ids, number, inputs.devices_of(number))

    return routed(start_all(start, inputs.num_replicas))


@register_rollout_engine("tgi", weights=Weights.REMOTE)
def build_tgi(inputs: EngineInputs) -> "RolloutEngine":
    """A client of a running TGI or OpenAI-compatible server."""
    from verl.workers.rollout.tgi import TGIEngine

    return TGIEngine(inputs.config, inputs.tokenizer)


def find_rollout_engine(name: str, external_lib: str | Sequence[str] | None = None) -> RegisteredEngine:
    """The engine of `rollout.name`; a name that is not known yet loads `model.external_lib` and the plug-ins."""
    if name not in ENGINES:
        import_external(external_lib)
        load_plugins()
    if name not in ENGINES:
        near = "".join(f" (did you mean {known!r}?)" for known in closest(name, ENGINES, count=1))
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name} is no rollout engine{near}; known: {', '.join(sorted(ENGINES))}. "
            "One of your own registers itself with verl.workers.rollout.registry.register_rollout_engine in a module "
            "that actor_rollout_ref.model.external_lib names, or in a plug-in"
        )
    return ENGINES.get(name)


def rollout_engine_of(arr: "ActorRolloutRefConfig") -> RegisteredEngine:
    """The engine of `rollout.name` as a run uses it: on devices of its own, one in place has copied weights there."""
    registered = find_rollout_engine(arr.rollout.name, arr.model.external_lib)
    if registered.apart is None or (arr.hybrid_engine and not arr.rollout.nnodes):
        return registered
    traits = replace(registered.traits, starts_on_nodes=True)
    return replace(registered, weights=Weights.COPIED, builder=registered.apart, traits=traits, is_apart=True)


def start_all(start: Callable[[int], Engine], count: int) -> list[Engine]:
    """`count` engines, which start in parallel; if one cannot, all are closed, so that none keeps its devices."""
    with ExitStack() as if_one_fails:
        engines: list[Engine] = []
        for number in range(count):
            engines.append(start(number))
            if_one_fails.callback(engines[-1].close)
        for engine in engines:
            engine.wait_until_ready()
        if_one_fails.pop_all()
    return engines


def routed(
    replicas: "Sequence[CopyingEngine]",
    start: "Callable[[int], CopyingEngine] | None" = None,
    max_restarts: int = 0,
    shares_devices: bool = False,
) -> "CopyingEngine":
    """The only replica, or a router over several, which starts another where one is lost."""
    from verl.workers.rollout.router import Router

    return replicas[0] if len(replicas) == 1 else Router(replicas, start, max_restarts, shares_devices)
