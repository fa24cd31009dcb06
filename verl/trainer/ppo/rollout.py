"""Which engine answers, how it samples, and how it gets the policy's weights."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from verl.config import RolloutConfig, RunConfig
from verl.data.batch import Batch
from verl.data.trajectory import Trajectory
from verl.plugin.platform import get_platform
from verl.utils.errors import ConfigError
from verl.weight_sync.base import WeightSync
from verl.weight_sync.by_copy import ByCopy
from verl.weight_sync.by_reference import ByReference
from verl.weight_sync.probe import ROUNDING, Probe, probe_sequences
from verl.workers.actor import Actor
from verl.workers.rollout.base import CopyingEngine, RolloutEngine, SamplingParams
from verl.workers.rollout.native_engine import NativeEngine, eos_ids


def build_rollout(config: RunConfig, actor: Actor, tokenizer: PreTrainedTokenizerBase) -> RolloutEngine:
    """The rollout engine of `rollout.name`."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in ("native", "hf"):
        return NativeEngine(rollout, actor.model, tokenizer, device=get_platform().device_name)
    if rollout.name == "vllm":
        return build_vllm(config, actor, tokenizer)
    raise ConfigError(f"actor_rollout_ref.rollout.name={rollout.name} is still to come; use native or vllm")


def build_vllm(config: RunConfig, actor: Actor, tokenizer: PreTrainedTokenizerBase) -> CopyingEngine:
    """vLLM in this process; in processes of their own, behind a router, where replicas or an environment ask for it."""
    rollout, path = config.actor_rollout_ref.rollout, str(config.actor_rollout_ref.model.path)
    eos = eos_ids(actor.model, tokenizer)
    if rollout.data_parallel_size == 1 and rollout.tensor_model_parallel_size == 1 and rollout.server.python is None:
        from verl.workers.rollout.vllm_engine import VLLMEngine

        return VLLMEngine(rollout, path, tokenizer, eos)
    from verl.workers.rollout.remote import RemoteEngine
    from verl.workers.rollout.router import Router

    engines = [RemoteEngine(rollout, path, eos, number) for number in range(rollout.data_parallel_size)]
    for engine in engines:  # they start side by side
        engine.ready()
    return engines[0] if len(engines) == 1 else Router(engines)


def build_weight_sync(config: RunConfig, actor: Actor, engine: RolloutEngine) -> WeightSync:
    """By reference to the native engine, by copy with a receipt to every other."""
    if not isinstance(engine, CopyingEngine):
        return ByReference(actor.model, engine)
    rollout = config.actor_rollout_ref.rollout
    rounding = ROUNDING[engine.dtype or next(actor.model.parameters()).dtype]

    async def scores(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return actor_scores(actor, sequences)

    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    vocab_size = int(actor.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
    sequences = probe_sequences(vocab_size, min(24, longest - 1))
    probe = Probe(sequences, scores, rounding)
    return ByCopy(actor.export_weights, engine, probe, rollout.checkpoint_engine.probe_every)


def actor_scores(actor: Actor, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs (nats, temperature 1) of each token by the trainer's own forward pass; 0 for the first."""
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
    logprobs = actor.logprobs(Batch.pack(trajectories), temperature=1.0)
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
