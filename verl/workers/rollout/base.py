"""The rollout engine's contract: token ids in; token ids, log-probs and the policy version out."""

import functools
import math
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
from verl.utils.errors import ConfigError, DataError, VerlError

_DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16, "auto": None,
}  # fmt: skip


class StaleWeightsError(VerlError):
    """A rollout engine that does not hold the weights it was sent."""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. `temperature == 0` is greedy; `top_k <= 0` and `top_p == 1` are off."""

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


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued `sampling.n` times. `request_id` also keys the random stream."""

    request_id: int
    prompt_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    conversation: int | None = None  # requests that share it continue each other, and go to one replica


@dataclass(frozen=True)
class Completion:
    """One continuation. `logprobs` are nats at the sampling temperature, one per token, before top-p and top-k."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str  # "stop" (EOS or stop condition), "length" or "aborted"
    policy_version: tuple[int, int]  # oldest and newest weights that sampled a token of it


TokenCallback = Callable[[int, list[int], list[float]], None]  # sample, its new token ids, their log-probs


class TokenStream:
    """Gives `on_tokens` the new tokens of each sample of one request."""

    def __init__(self, on_tokens: TokenCallback):
        self.on_tokens = on_tokens
        self.num_sent: Counter[int] = Counter()  # tokens, by sample

    def send(self, sample: int, token_ids: list[int], logprobs: list[float]) -> None:
        """`token_ids` and `logprobs` begin after those sent before."""
        if token_ids:
            self.num_sent[sample] += len(token_ids)
            self.on_tokens(sample, token_ids, logprobs)


class RolloutEngine(ABC):
    """Samples from the newest published policy. All methods are coroutines; many `generate` calls run at once."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """`request.sampling.n` completions, in sample order. An aborted request returns what was produced."""

    @functools.cached_property
    def token_streams(self) -> dict[int, TokenStream]:
        """Where new tokens go while they are sampled, by request id."""
        return {}

    async def stream(self, request: GenerationRequest, on_tokens: TokenCallback) -> list[Completion]:
        """`generate`; every token goes to `on_tokens` once, as it is sampled by engines that use `token_streams`."""
        token_stream = self.token_streams[request.request_id] = TokenStream(on_tokens)
        try:
            completions = await self.generate(request)
        finally:
            del self.token_streams[request.request_id]
        for sample, completion in enumerate(completions):
            sent = token_stream.num_sent[sample]
            token_stream.send(sample, completion.token_ids[sent:], completion.logprobs[sent:])
        return completions

    @abstractmethod
    async def update_weights(self, weights: Any, version: int) -> None:
        """Sample from `version` from now on. `weights`: iterable of (HF name, tensor), or the trainer's own module."""

    @abstractmethod
    async def sleep(self) -> None:
        """Free the cache (and copied weights) until `wake`."""

    @abstractmethod
    async def wake(self) -> None:
        """Make ready to generate."""

    @abstractmethod
    async def abort(self, request_id: int | None = None) -> None:
        """Stop one request, or all of them; their `generate` calls return what was produced."""

    def close(self) -> None:  # noqa: B027  (most engines hold nothing of that kind)
        """End processes and free what this one cannot free by itself. The engine cannot be used afterwards."""

    async def compute_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs (nats, temperature 1) of each token given those before it; 0 for the first of a sequence.

        Computed by the very path that samples: this is how a publish is proved.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot compute log-probs of given tokens")

    @property
    @abstractmethod
    def version(self) -> int:
        """The weights in use."""

    @property
    def copied_bytes(self) -> int:
        """Weights held besides the trainer's own tensors, proved at each publish."""
        return 0

    def stats(self) -> dict[str, float]:
        """Counters since the last call (tokens, batch occupancy, cache use, time in model and sampling)."""
        return {}


class CopyingEngine(RolloutEngine):
    """An engine with a copy of the weights of its own: they arrive between `begin_update` and `finish_update`, handed
    over by `load_bucket` or by `transport_step`. `replicas` are the engines behind it, or itself."""

    bucket_bytes: int
    dtype: torch.dtype | None = None  # what floating-point weights are cast to before they travel
    out_of_process = False  # whether its workers are other processes, which only a transport reaches
    endpoint: TransportEndpoint | None = None

    @property
    def replicas(self) -> "Sequence[CopyingEngine]":
        return [self]

    @property
    def receivers(self) -> "Sequence[CopyingEngine]":
        """Who takes part in a transport."""
        return [self]

    @abstractmethod
    async def begin_update(self) -> None:
        """Make ready for a whole set of weights; nothing is sampled until `finish_update`."""

    async def load_bucket(self, bucket: list[tuple[str, Tensor]]) -> list[Manifest]:
        """Take over some tensors; per replica, the fingerprint of each as it arrived."""
        raise NotImplementedError(f"{type(self).__name__} takes weights through a transport only")

    async def transport_step(self, step: str, argument: Any) -> list[Any]:
        """A step of `checkpoint_engine.ends.TransportEndpoint` on every worker of this receiver; what each answers.

        "connect" takes the arguments of each worker. "receive" begins an update, loads all weights of a version and
        answers, per replica, the fingerprint of each as it arrived.
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
        """Sample from the new weights as `version`; what was computed by older ones is forgotten.

        Raises StaleWeightsError where a parameter got no value.
        """

    async def update_weights(self, weights: nn.Module | Iterable[tuple[str, Tensor]], version: int) -> None:
        await self.begin_update()
        for bucket in buckets(named_weights(weights), self.bucket_bytes, self.dtype):
            await self.load_bucket(bucket)
        await self.finish_update(version)


def named_weights(weights: nn.Module | Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """(HF name, tensor) pairs; of a module each parameter once, so a tied head is not among them."""
    return weights.named_parameters() if isinstance(weights, nn.Module) else weights


TEMPERATURE_RANGE = (1e-6, 1e6)  # beyond, logits divided by it are not finite


def check_request(
    request: GenerationRequest,
    max_model_len: int,
    in_flight: Collection[int],
    has_tokenizer: bool,
    vocab_size: float = math.inf,
) -> None:
    """Refuse what cannot be answered, with the numbers, before it can end what else is being answered.

    `max_model_len`: tokens one sequence may hold; `vocab_size`: token ids there are, where it is known.
    """
    params, prompt = request.sampling, len(request.prompt_ids)
    if request.request_id in in_flight:
        raise DataError(f"request_id {request.request_id} is already in flight; give each request its own")
    if not prompt:
        raise DataError(f"request {request.request_id} has an empty prompt; give at least one token (a BOS token)")
    if prompt + params.max_tokens > max_model_len:
        raise DataError(
            f"request {request.request_id}: {prompt} prompt tokens + max_tokens={params.max_tokens} exceed the "
            f"{max_model_len} tokens one sequence may hold; shorten the prompt (data.max_prompt_length), lower "
            f"max_tokens (at most {max(max_model_len - prompt, 0)} here) or "
            f"raise actor_rollout_ref.rollout.max_model_len"
        )
    lowest, highest = TEMPERATURE_RANGE
    temperature_is_valid = params.temperature == 0 or lowest <= params.temperature <= highest
    if params.n < 1 or params.max_tokens < 1 or not 0 < params.top_p <= 1 or not temperature_is_valid:
        raise DataError(
            f"request {request.request_id}: n={params.n} and max_tokens={params.max_tokens} must be at least 1, "
            f"top_p={params.top_p} in (0, 1], temperature={params.temperature} 0 or in [{lowest:g}, {highest:g}]"
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab_size:
        wrong = next(token for token in request.prompt_ids if not 0 <= token < vocab_size)
        raise DataError(f"request {request.request_id}: token id {wrong} of the prompt is not in 0 to {vocab_size - 1}")
    if params.stop and not has_tokenizer:
        raise DataError("stop strings need a tokenizer; give the engine one, or use stop_token_ids")


def max_stop_tokens(params: SamplingParams) -> int:
    """How many of the last tokens may hold a stop string: a character is at most four byte-level tokens."""
    return 4 * max(map(len, params.stop), default=0) + 8


def completes_stop_text(
    params: SamplingParams, num_tokens: int, tail: list[int], decode: Callable[[list[int]], str] | None
) -> bool:
    """Whether the newest of `num_tokens` tokens completed a stop string. `tail`: the last of them."""
    if not params.stop or num_tokens < params.min_tokens or decode is None:
        return False
    text = decode(tail)
    return any(stop in text for stop in params.stop)


def rollout_dtype(name: str) -> torch.dtype | None:
    """The dtype `rollout.dtype` names; None (auto) is the model's own."""
    if name not in _DTYPES:
        raise ConfigError(f"actor_rollout_ref.rollout.dtype={name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
