"""The frozen reference policy of the KL term."""

import dataclasses

from torch import Tensor

from verl.config import RunConfig
from verl.config.actor import LOG_PROB_BATCHING_KEYS
from verl.config.check import actor_is_reference
from verl.data.batch import Batch
from verl.models.lora import wants_lora
from verl.runtime.group import WorkerGroup
from verl.workers.batch_dispatch import OnSequences, ShardDispatcher, ignore
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine_worker import EngineWorker, WorkerWithoutAdapters, micro_batching


class Reference:
    """Log-probs of the policy as it was before training."""

    def __init__(self, config: RunConfig, group: WorkerGroup, on_sequences: OnSequences = ignore):
        arr = config.actor_rollout_ref
        shared, balanced = arr.actor.use_prefix_grouper, config.trainer.balance_batch
        self.dispatcher = ShardDispatcher(group, balanced, shared, on_sequences=on_sequences)
        ref, rollout = arr.ref, arr.rollout
        self.temperature = rollout.temperature if rollout.do_sample and rollout.temperature > 0 else 1.0
        self.micro = micro_batching(ref, LOG_PROB_BATCHING_KEYS, ranks_per_replica(config))

    def logprobs(self, batch: Batch) -> Tensor:
        """(T,) log-probs of sampled tokens at the sampling temperature, 0 elsewhere."""
        inputs = batch.select_columns(())
        return self.dispatcher.forward(inputs, ("logprobs",), self.micro, self.temperature)["logprobs"]


def ranks_per_replica(config: RunConfig) -> int:
    """How many ranks split a sequence; the actor's setting where its engine runs the reference."""
    arr = config.actor_rollout_ref
    return (arr.actor if actor_is_reference(config) else arr.ref).engine.ranks_per_sequence


def build_reference_worker(config: RunConfig, actor: EngineWorker | None) -> EngineWorker:
    """A forward-only worker on the initial weights, or with LoRA on those of the base model.

    With LoRA it is the `actor` of these ranks with its adapters disabled, if they have one.
    """
    arr = config.actor_rollout_ref
    if actor is not None and wants_lora(arr.model):
        return WorkerWithoutAdapters(actor)
    base_model = dataclasses.replace(arr.model, lora_rank=0, lora_adapter_path=None)
    return EngineWorker(EngineRegistry.new("language_model", arr.ref.strategy, base_model, arr.ref.engine))


def frozen_worker(worker: EngineWorker) -> EngineWorker:
    """A forward-only worker on the initial weights of `worker`; with LoRA its own engine with its adapters disabled."""
    engine = worker.engine
    if wants_lora(engine.model_config):
        return WorkerWithoutAdapters(worker)
    return EngineWorker(type(engine)(engine.model_config, engine.engine_config, None, None))
