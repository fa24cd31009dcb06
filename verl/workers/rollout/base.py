"""The rollout engine interface: takes token ids; returns token ids, log-probs and the policy version."""

import functools
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from verl.checkpoint_engine.buckets import buckets
from verl.checkpoint_engine.endpoint import Manifest, TransportEndpoint
from verl.utils.errors import ConfigError, VerlError
from verl.workers.rollout.engine_stats import EngineStats

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16, "auto": None,
}  # fmt: skip


class StaleWeightsError(VerlError):
    """A rollout engine does not hold the weights that it was sent."""


@dataclass(frozen=True)
class ReadBack:
    """The result of comparing an engine's layers after an update with what arrived."""

    num_tensors: int  # tensors of the update that were read back
    wrong: tuple[tuple[str, str, str, str], ...] = ()  # tensor, layer, fingerprints that arrived and that it holds
    missing: tuple[str, ...] = ()  # parameters of the engine that received no value
    unread: tuple[str, ...] = ()  # parameters of the engine whose layout is not known
    num_adapters: int = 0  # tensors of adapters in the update
    pause_s: float | None = None  # how long sampling stood still for the update; None: not known

    def check(self, whose: str, version: int) -> None:
        """Raise StaleWeightsError for the first parameter that does not hold `version`."""
        if self.missing:
            raise StaleWeightsError(
                f"{whose}: version {version} brought no value for {len(self.missing)} of the engine's parameters, "
                f"first {self.missing[0]}; the names of the trainer's model and the engine's do not agree"
            )
        if self.wrong:
            name, layer, arrived, held = self.wrong[0]
            raise StaleWeightsError(
                f"{whose}: {layer} computes with another {name} than version {version} has (arrived {arrived}, held "
                f"{held}); {len(self.wrong)} tensors differ. Nothing was sampled from it; start the run again, and if "
                "it happens again, update the engine or use rollout.name=native"
            )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings. `temperature == 0` means greedy; `top_k <= 0` and `top_p == 1` mean off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = 1
    max_tokens: int = 512
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 42
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0  # tokens less likely than this share of the likeliest one are not sampled
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    top_logprobs: int = 0  # most likely tokens reported at each position
    response_format: str | None = None  # JSON text of an OpenAI response_format, for engines that list its type

    @property
    def has_penalties(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def changes_logits(self) -> bool:
        return self.has_penalties or bool(self.logit_bias)


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue `sampling.n` times. The random number of a token comes from the seed, `stream_id`, the
    sample and the token's position."""

    request_id: int
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    conversation: int | None = None  # the requests of one conversation go to one replica
    random_stream: int | None = None  # requests with the same seed and number draw the same random numbers
    # What was sampled of each answer before: the unfinished ones go on after their tokens, the others are answers.
    sampled: "tuple[Completion, ...]" = ()

    @property
    def stream_id(self) -> int:
        """The number that tells random streams of one seed apart: `request_id` unless `random_stream` is given."""
        return self.request_id if self.random_stream is None else self.random_stream


Alternatives = list[tuple[int, float]]  # the most likely tokens of one position with their log-probs, best first


@dataclass(frozen=True)
class Completion:
    """One sampled answer. `logprobs`: nats, one per token, of the policy at the sampling temperature, whatever top-p,
    top-k, min-p, min_tokens, penalties or `logit_bias` do. `alternatives`: so too, if `top_logprobs` asked for them."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str  # "stop" (EOS or stop condition), "length" or "aborted"
    policy_version: tuple[int, int]  # oldest and newest version that sampled its tokens
    alternatives: list[Alternatives] | None = None
    segments: tuple[tuple[int, int], ...] = ()  # (version, tokens that it sampled), in order, if there were several

    @classmethod
    def of(
        cls,
        token_ids: list[int],
        logprobs: list[float],
        stop_reason: str,
        segments: Sequence[tuple[int, int]],
        alternatives: list[Alternatives] | None = None,
    ) -> "Completion":
        """A completion with all its `segments`, of which there may be one."""
        versions = (segments[0][0], segments[-1][0])
        several = tuple(segments) if len(segments) > 1 else ()
        return cls(token_ids, logprobs, stop_reason, versions, alternatives, several)

    @classmethod
    def empty(cls, version: int) -> "Completion":
        """An answer without a token."""
        return cls([], [], "aborted", (version, version))

    @property
    def is_unfinished(self) -> bool:
        return self.stop_reason == "aborted"

    @property
    def all_segments(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens that it sampled), in order; of one version too."""
        return self.segments or ((self.policy_version[1], len(self.token_ids)),)


JSON_FORMATS = ("json_object", "json_schema")


def response_schema(params: SamplingParams) -> str | None:
    """The JSON schema (as text) that `response_format` asks for; None without one."""
    if params.response_format is None:
        return None
    asked = json.loads(params.response_format)
    return json.dumps(asked["json_schema"]["schema"] if asked["type"] == "json_schema" else {"type": "object"})


TokenCallback = Callable[..., None]  # (sample index, new token ids, log-probs), and alternatives if asked for


class TokenStream:
    """Passes the new tokens of each sample of one request to `on_tokens`."""

    def __init__(self, on_tokens: TokenCallback):
        self.on_tokens = on_tokens
        self.num_sent: Counter[int] = Counter()  # tokens sent so far, by sample

    def send(
        self, sample: int, token_ids: list[int], logprobs: list[float], alternatives: list[Alternatives] | None = None
    ) -> None:
        """Send tokens that follow the tokens sent so far; `alternatives` are those of the whole sample."""
        if token_ids:
            sent = self.num_sent[sample]
            self.num_sent[sample] += len(token_ids)
            more = () if alternatives is None else (alternatives[sent : self.num_sent[sample]],)
            self.on_tokens(sample, token_ids, logprobs, *more)


class RolloutEngine(ABC):
    """Samples from the newest published policy. Many `generate` calls can run at the same time."""

    response_formats: Collection[str] = ()  # values of response_format.type that answers can be held to
    lost: str | None = None  # how its process ended, or the last of its replicas; None: it works
    metrics_addresses: Sequence[str] = ()  # host:port of servers that answer Prometheus themselves
    lost_replicas: Sequence[int] = ()  # those that others stand in for, and that nothing replaces
    can_park = False  # whether unfinished answers have to wait while new weights arrive, by `park` and `resume`

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """`request.sampling.n` completions, in sample order. An aborted request returns the tokens sampled so far."""

    @functools.cached_property
    def token_streams(self) -> dict[int, TokenStream]:
        """Streams that receive new tokens while they are sampled, by request id."""
        return {}

    async def stream(self, request: GenerationRequest, on_tokens: TokenCallback) -> list[Completion]:
        """Like `generate`; passes each token to `on_tokens` once, while sampling if the engine uses `token_streams`."""
        token_stream = self.token_streams[request.request_id] = TokenStream(on_tokens)
        try:
            completions = await self.generate(request)
        finally:
            del self.token_streams[request.request_id]
        for sample, completion in enumerate(completions):
            sent = token_stream.num_sent[sample]
            new_ids, new_logprobs = completion.token_ids[sent:], completion.logprobs[sent:]
            token_stream.send(sample, new_ids, new_logprobs, completion.alternatives)
        return completions

    @abstractmethod
    async def update_weights(self, weights: Any, version: int) -> None:
        """Load `weights` as `version`. `weights`: an iterable of (HF name, tensor), or the trainer's own module."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free the KV cache (and copied weights) until `wake`."""

    async def sleep_until_update(self) -> None:
        """Sleep where new weights arrive before anything is sampled again: an engine may drop those that it has."""
        await self.sleep()

    @abstractmethod
    async def wake(self) -> None:
        """Prepare to generate again."""

    @abstractmethod
    async def abort(self, request_id: int | None = None) -> None:
        """Stop one request, or all; their `generate` calls return the tokens sampled so far."""

    def close(self) -> None:  # noqa: B027  (most engines have nothing to close)
        """End the engine's processes and free process-wide state. The engine cannot be used afterwards."""

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of each token given the preceding ones; 0 for the first token.

        By the forward pass that samples, so that they verify a publish. Of several data-parallel ranks, those of the
        first for all `sequences` come first.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot compute log-probs of given tokens")

    async def park(self) -> None:
        """Stop sampling between two tokens, until `resume`; the `generate` calls wait. An engine that keeps the KV
        cache of what runs is not put to sleep meanwhile."""
        raise NotImplementedError(f"{type(self).__name__} cannot keep unfinished answers over a publish")

    async def resume(self) -> None:  # noqa: B027
        """Go on with what was parked, under the weights that are published now. Without parked answers: nothing."""

    async def in_flight(self) -> list[GenerationRequest]:
        """The requests whose `generate` has not returned, each with what was `sampled` of it so far."""
        return []

    def restore(self, requests: Sequence[GenerationRequest]) -> None:  # noqa: B027
        """Let the next `generate` of each of `requests` go on from there, in another process."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Policy version of the weights in use."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of weight copies besides the trainer's own tensors; each publish verifies them."""
        return 0

    async def stats(self) -> list[EngineStats]:
        """Counts of each replica or rank since it started, always in the same order; `metrics_between` subtracts."""
        return []


class CopyingEngine(RolloutEngine):
    """An engine with its own copy of the weights. New weights arrive between `begin_update` and `finish_update`,
    through `load_bucket` or `transport_step`. `replicas`: the engines that it drives, or itself."""

    bucket_bytes: int
    dtype: torch.dtype | None = None  # floating-point weights are cast to it before they are sent
    out_of_process = False  # whether its workers are other processes, reached through a transport only
    endpoint: TransportEndpoint | None = None
    read_back = ReadBack(0)  # of the last update
    has_started = True  # false until `wait_until_ready` returns, or raises, at once

    @property
    def replicas(self) -> "Sequence[CopyingEngine]":
        return [self]

    @property
    def replica_numbers(self) -> Sequence[int]:
        """The number of each of `replicas`, which the one that takes its place keeps."""
        return range(len(self.replicas))

    @property
    def receivers(self) -> "Sequence[CopyingEngine]":
        """The engines that take part in a transport."""
        return [self]

    def wait_until_ready(self) -> None:
        """Wait until the engine has started; raises the error that prevented the start."""

    async def renew(self) -> None:
        """Before an update: find the engines that are lost, and let those join that take the place of earlier ones."""

    @abstractmethod
    async def begin_update(self) -> None:
        """Prepare to receive all weights; nothing is sampled until `finish_update`."""

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[Manifest]:
        """Load some tensors; returns, per replica, the fingerprint of each tensor as received."""
        raise NotImplementedError(f"{type(self).__name__} takes weights through a transport only")

    async def transport_step(self, step: str, argument: Any) -> list[Any]:
        """Run a step of `checkpoint_engine.endpoint.TransportEndpoint` on each worker; returns their results.

        "connect" takes a list with the arguments of each worker. "receive" begins an update, loads all weights of a
        version and returns, per replica, the fingerprint of each tensor as received.
        """
        self.endpoint = self.endpoint or TransportEndpoint()
        if step == "connect":
            [argument] = argument
        if step != "receive":
            return [getattr(self.endpoint, step)(argument)]
        await self.begin_update()
        arrived: list[Manifest] = [{} for _ in self.replicas]
        with closing(self.endpoint.receive(argument)) as arriving:
            for bucket in arriving:
                for replica_manifest, bucket_manifest in zip(arrived, await self.load_bucket(bucket), strict=True):
                    replica_manifest |= bucket_manifest
        return arrived

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Sample from the new weights as `version`; drops caches computed with older weights.

        Raises StaleWeightsError if a parameter received no value.
        """

    async def update_weights(self, weights: nn.Module | Iterable[tuple[str, Tensor]], version: int) -> None:
        await self.begin_update()
        for bucket in buckets(named_weights(weights), self.bucket_bytes, self.dtype):
            await self.load_bucket(bucket)
        await self.finish_update(version)


def named_weights(weights: nn.Module | Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """(HF name, tensor) pairs; a module yields each parameter once, so a tied head is not included."""
    return weights.named_parameters() if isinstance(weights, nn.Module) else weights


def same_on_all_ranks(replica: int, by_rank: list[Manifest]) -> Manifest:
    """The fingerprints that every rank of a replica reports of what arrived."""
    first = by_rank[0]
    for rank, arrived in enumerate(by_rank):
        differs = [name for name in first if arrived.get(name) != first[name]]
        if differs:
            raise StaleWeightsError(f"replica {replica}: rank {rank} received another {differs[0]} than rank 0")
    return first


def rollout_dtype(name: str) -> torch.dtype | None:
    """The torch dtype of `rollout.dtype`; None (auto) means the model's own."""
    if name not in _DTYPES:
        raise ConfigError(f"actor_rollout_ref.rollout.dtype={name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
