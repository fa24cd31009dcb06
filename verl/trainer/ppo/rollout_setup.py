"""Builds the rollout engine, its sampling parameters and its weight sync."""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from verl.checkpoint_engine.endpoint import TransportSettings
from verl.checks.machine import check_rollout_engine_is_installed
from verl.config import ActorRolloutRefConfig, HFModelConfig, RolloutConfig, RunConfig
from verl.config.rollout import ServerConfig
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.models.folder_checks import end_tokens
from verl.models.load import build_config, changed_config, load_causal_lm, model_folder
from verl.models.lora import add_adapters
from verl.models.merged_folder import merged_folder
from verl.placement.plan import ROLLOUT, Plan, replicas_without_devices, splits_rollout
from verl.plugin.platform import get_platform
from verl.runtime.group import WorkerGroup
from verl.utils.errors import ConfigError
from verl.weight_sync.base import WeightSync
from verl.weight_sync.copy_sync import CopySync
from verl.weight_sync.in_place_sync import InPlaceSync
from verl.weight_sync.logprob_probe import LogprobProbe, probe_sequences
from verl.weight_sync.weight_transfer import WeightTransfer
from verl.workers.actor import Actor
from verl.workers.rollout.adapters import adapter_arguments, publishes_adapters
from verl.workers.rollout.base import CopyingEngine, RolloutEngine, SamplingParams, rollout_dtype
from verl.workers.rollout.engines import find_rollout_engine, rollout_engine_of
from verl.workers.rollout.native.engine import in_place_inputs
from verl.workers.rollout.registry import EngineInputs, Weights, why_not_trained
from verl.workers.rollout.remote.handshake import new_secret
from verl.workers.rollout.remote.process import DriversSettings, ServerOnNode, start_on_node

logger = logging.getLogger(__name__)


def build_rollout_engine(
    config: RunConfig, plan: Plan, actor: Actor, tokenizer: PreTrainedTokenizerBase
) -> RolloutEngine:
    """The rollout engine of `rollout.name`, which takes the actor's weights; one that only generates is refused."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    registered = rollout_engine_of(config.actor_rollout_ref)
    if not registered.can_train:
        raise ConfigError(why_not_trained(rollout.name))
    if registered.weights is Weights.IN_PLACE:
        return registered.build(in_place_inputs(rollout, actor.model, tokenizer, get_platform().device_name))
    beside_ranks = actor.group.local_worker is None
    sized = replace(rollout_of_run(config), data_parallel_size=plan.rollout.data)  # inside a replica
    inputs = copied_inputs(sized, model, tokenizer, plan.rollout.count)
    if plan.runtime != "ray":  # where ranks may have other devices
        devices = plan.rollout_devices
        inputs = replace(inputs, devices=devices if beside_ranks or devices != ((0,),) else ())  # this process's own
    elif registered.traits.starts_on_nodes:
        own = registered.traits.joins_server  # such an engine starts a server itself, with `server.python`
        settings = replace(rollout.server, python=None) if own else rollout.server
        start = partial(start_server, plan, actor.group, settings)
        inputs = replace(inputs, devices=plan.rollout_devices, start_server=start)
    engine = registered.build(inputs)
    if (built := len(cast(CopyingEngine, engine).replicas)) != plan.rollout.count:
        logger.warning(
            "rollout.name=%s answers with %d replicas where %d are planned: its builder leaves num_replicas unread",
            rollout.name, built, plan.rollout.count,
        )  # fmt: skip
    return engine


def start_server(plan: Plan, group: WorkerGroup, settings: ServerConfig, replica: int) -> ServerOnNode:
    """The server of a replica on the machine and the devices that the plan names: those of ranks of `group`, or others
    of the cluster. It starts while others do."""
    (node, devices), pool, secret = plan.rollout_places[replica], plan.rollout_pool, new_secret()
    factory = partial(start_on_node, settings.python, secret, DriversSettings.on(get_platform()))
    if pool.roles == ("rollout",):
        held = group.hold(factory, node, num_devices=len(devices))
    else:
        held = group.hold(factory, node, [node * pool.per_node + device for device in devices])
    return ServerOnNode(held, secret, settings.max_start_wait_time)


def rollout_of_run(config: RunConfig) -> RolloutConfig:
    """`rollout` as a run uses it: on devices of its own nothing has to sleep, and vLLM is told of adapters."""
    rollout = config.actor_rollout_ref.rollout
    if arguments := adapter_arguments(config.actor_rollout_ref):
        kwargs = replace(rollout.engine_kwargs, vllm=arguments | rollout.engine_kwargs.vllm)
        rollout = replace(rollout, engine_kwargs=kwargs)
    if not splits_rollout(config):
        return rollout
    share = rollout.standalone_gpu_memory_utilization or rollout.gpu_memory_utilization
    return replace(rollout, free_cache_engine=False, gpu_memory_utilization=share)


def build_standalone_engine(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """The rollout engine without a trainer, on the weights of `model.path` and with the adapters of
    `model.lora_adapter_path`: generation, serving, evaluation."""
    rollout, settings = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    check_rollout_engine_is_installed(config.actor_rollout_ref)
    registered = find_rollout_engine(rollout.name, settings.external_lib)
    if registered.weights is Weights.IN_PLACE:
        dtype = rollout_dtype(rollout.dtype) or torch.float32
        device = get_platform().device_name
        changed, init_random = build_config(settings)
        model = load_causal_lm(settings.path or "", dtype, changed, init_random)
        if settings.lora_adapter_path is not None:
            add_adapters(model, settings, seed=0)
        model.to(torch.device(device))  # type: ignore[arg-type]
        return registered.build(in_place_inputs(rollout, model, tokenizer, device))
    joins_server = registered.traits.joins_server and rollout.server.url is not None
    for key in ("lora_adapter_path", "override_config") if joins_server or registered.weights is Weights.REMOTE else ():
        if settings[key]:
            raise ConfigError(
                f"actor_rollout_ref.model.{key}={settings[key]} has no effect on a server that runs already "
                f"({ROLLOUT}.server.url), which would answer without it; start it with the merged model, or with a "
                "config.json that has the values, and leave this out"
            )
    if registered.weights is Weights.REMOTE:
        return registered.build(EngineInputs(rollout, tokenizer))
    if settings.lora_adapter_path is not None:
        settings = replace(settings, path=str(merged_folder(settings)))
    loaded = replace(rollout, load_format="auto") if rollout.load_format == "dummy" else rollout
    notes: list[str] = []
    replicas = replicas_without_devices(rollout, notes)
    for note in notes:
        logger.warning(note)
    loaded = replace(loaded, data_parallel_size=1)  # `replicas` has it
    devices = () if joins_server or replicas == 1 else _devices_of_replicas(replicas, rollout)
    return registered.build(replace(copied_inputs(loaded, settings, tokenizer, replicas), devices=devices))


def _devices_of_replicas(count: int, rollout: RolloutConfig) -> tuple[tuple[int, ...], ...]:
    """Indices of the devices of each replica, in order; none on CPUs. ConfigError where this machine has too few."""
    platform, size = get_platform(), rollout.tensor_model_parallel_size
    if platform.device_name == "cpu":
        return ()
    if count * size > (there := platform.device_count()):
        most = f"lower {ROLLOUT}.num_replicas to at most {there // size}" if there >= size else "use a smaller one"
        raise ConfigError(
            f"{count} replicas with {ROLLOUT}.tensor_model_parallel_size={size} take {count * size} devices, and "
            f"{there} are visible; {most}"
        )
    return tuple(tuple(range(first, first + size)) for first in range(0, count * size, size))


def copied_inputs(
    rollout: RolloutConfig, model: HFModelConfig, tokenizer: PreTrainedTokenizerBase, num_replicas: int = 1
) -> EngineInputs:
    """The inputs of `num_replicas` engines with a copy each of the model."""
    folder = model_folder(model.path)
    eos = tuple(end_tokens(build_config(model)[0], folder, tokenizer))
    rollout = with_model_overrides(rollout, overrides := changed_config(model))
    return EngineInputs(
        rollout, tokenizer, eos, model_path=str(folder), num_replicas=num_replicas, config_overrides=overrides
    )


def with_model_overrides(rollout: RolloutConfig, overrides: dict[str, Any]) -> RolloutConfig:
    """`rollout`, whose engine reads config.json and gets the values that replace those of it; what `engine_kwargs` says
    of them goes first. A server that runs already has to be told by whoever starts it."""
    if not overrides:
        return rollout
    own, argument = rollout.engine_kwargs, "json_model_override_args"
    sglang = json.dumps(overrides | json.loads(own.sglang.get(argument, "{}")))
    if rollout.name == "sglang" and rollout.server.url is not None:
        logger.warning(
            "the server at %s (%s.server.url) has to be started with --json-model-override-args '%s', the values of "
            "actor_rollout_ref.model.override_config", rollout.server.url, ROLLOUT, sglang,
        )  # fmt: skip
    vllm, native = (
        {**given, "hf_overrides": overrides | given.get("hf_overrides", {})} for given in (own.vllm, own.native)
    )
    kwargs = replace(own, vllm=vllm, native=native, sglang={**own.sglang, argument: sglang})
    return replace(rollout, engine_kwargs=kwargs)


def check_rollout_engine_can_train(arr: ActorRolloutRefConfig) -> None:
    """ConfigError where the engine of `rollout.name` cannot train with these settings."""
    rollout, registered = arr.rollout, rollout_engine_of(arr)
    if not registered.can_train:
        raise ConfigError(why_not_trained(rollout.name))
    if registered.weights is Weights.IN_PLACE and rollout.checkpoint_engine.backend != "naive":
        raise ConfigError(
            f"actor_rollout_ref.rollout.checkpoint_engine.backend={rollout.checkpoint_engine.backend} has nothing to "
            f"carry: rollout.name={rollout.name} samples where the trainer is; leave it at naive"
        )
    adapter_arguments(arr)


def build_weight_sync(config: RunConfig, plan: Plan, actor: Actor, engine: RolloutEngine) -> WeightSync:
    """In-place sync for an engine that samples from the actor's module, copy sync with a receipt for every other."""
    rollout = config.actor_rollout_ref.rollout
    registered = rollout_engine_of(config.actor_rollout_ref)
    if registered.weights is Weights.IN_PLACE:
        return InPlaceSync(actor.model, engine)
    engine = cast(CopyingEngine, engine)
    transport, weight_transfer = rollout.checkpoint_engine, None
    if actor.group.local_worker is not None and not engine.receivers[0].out_of_process:
        if transport.backend != "naive":
            raise ConfigError(
                f"actor_rollout_ref.rollout.checkpoint_engine.backend={transport.backend} has nothing to carry: with "
                f"rollout.name={rollout.name} the weights stay in this process; leave it at naive, or give vllm "
                "servers of their own (rollout.num_replicas, rollout.server.python)"
            )
    else:
        reaching = _reaching(transport_settings(rollout), config, plan, actor)
        weight_transfer = WeightTransfer(reaching, actor.group, engine)
    dtype = engine.dtype or torch.float32

    async def trainer_logprobs(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return actor_logprobs(actor, sequences)

    async def cast_logprobs(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return actor_logprobs(actor, sequences, dtype)

    max_length = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    vocab_size = build_config(config.actor_rollout_ref.model)[0].get_text_config().vocab_size
    sequences = probe_sequences(vocab_size, min(24, max_length - 1))
    probe = LogprobProbe(sequences, trainer_logprobs, cast_logprobs if actor.can_cast else None, dtype)
    if registered.is_apart:  # the trainer's own decoder, whose every tensor is read back
        return CopySync(actor.export_weights, engine, None, 0, weight_transfer)
    adapters = actor.export_adapters if publishes_adapters(config.actor_rollout_ref) else None
    return CopySync(actor.export_weights, engine, probe, transport.probe_every, weight_transfer, adapters)


def transport_settings(rollout: RolloutConfig) -> TransportSettings:
    """`rollout.checkpoint_engine` as the settings of every transport endpoint."""
    settings = rollout.checkpoint_engine
    return TransportSettings(
        settings.backend,
        settings.update_weights_bucket_megabytes << 20,
        dict(settings.engine_kwargs.get(settings.backend) or {}),
        settings.custom_backend_module,
    )


def _reaching(settings: TransportSettings, config: RunConfig, plan: Plan, actor: Actor) -> TransportSettings:
    """`settings` for several machines: replicas on machines without ranks get a broadcast, from rank 0's address."""
    if plan.runtime != "ray" or plan.num_nodes == 1:
        return settings
    with_ranks = range(config.trainer.nnodes)
    if settings.backend == "naive" and any(node not in with_ranks for node, _ in plan.rollout_places):
        given = config.actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.get("nccl") or {}
        settings = replace(settings, backend="nccl", arguments=dict(given))  # the platform's library
        logger.info("replicas on machines without ranks: their weights come by checkpoint_engine.backend=nccl")
    if settings.backend in ("nccl", "hccl", "gloo") and "address" not in settings.arguments:
        return replace(settings, arguments={**settings.arguments, "address": actor.group.address})
    return settings


def actor_logprobs(
    actor: Actor, sequences: Sequence[Sequence[int]], dtype: torch.dtype | None = None
) -> list[list[float]]:
    """Log-probs (nats, temperature 1) of each token by the trainer's own forward pass; 0 for the first.

    With `dtype`, that of its weights cast to it.
    """
    trajectories = [
        Trajectory(
            tokens=torch.tensor(ids),
            loss_mask=torch.tensor([False] + [True] * (len(ids) - 1)),
            rollout_logprobs=torch.zeros(len(ids)),
            group_id=number,
            row=number,
            reward=0.0,
            policy_version=(0, 0),
            stop_reason="length",
        )
        for number, ids in enumerate(sequences)
    ]
    logprobs = actor.logprobs(Batch.pack(trajectories), temperature=1.0, dtype=dtype)
    return [part.tolist() for part in logprobs.split([len(ids) for ids in sequences])]


def training_sampling(rollout: RolloutConfig) -> SamplingParams:
    """How training rollouts are sampled."""
    return SamplingParams(
        temperature=rollout.temperature if rollout.do_sample else 0.0,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        n=rollout.n,
        max_tokens=rollout.response_length,
        ignore_eos=rollout.ignore_eos,
        seed=rollout.seed,
        min_tokens=rollout.min_tokens,
        stop=tuple(rollout.stop or ()),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )


def validation_sampling(rollout: RolloutConfig) -> SamplingParams:
    """How validation answers are sampled: greedy unless `val_kwargs.do_sample`."""
    val = rollout.val_kwargs
    if val.do_sample and not val.temperature > 0:
        raise ConfigError(
            f"actor_rollout_ref.rollout.val_kwargs.do_sample=True needs val_kwargs.temperature > 0, "
            f"got {val.temperature}; set it (1.0 is usual) or do_sample=False"
        )
    return SamplingParams(
        temperature=val.temperature if val.do_sample else 0.0,
        top_p=val.top_p,
        top_k=val.top_k,
        n=val.n if val.do_sample else 1,
        max_tokens=rollout.response_length,
        seed=rollout.seed,
        min_tokens=rollout.min_tokens,
        stop=tuple(rollout.stop or ()),
        stop_token_ids=tuple(rollout.stop_token_ids),
    )
