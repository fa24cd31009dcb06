"""The rollout engine's contract: token ids in; token ids, log-probs and the policy version out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


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


@dataclass(frozen=True)
class Completion:
    """One continuation. `logprobs` are nats at the sampling temperature, one per token, before top-p and top-k."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str  # "stop" (EOS or stop condition), "length" or "aborted"
    policy_version: tuple[int, int]  # oldest and newest weights that sampled a token of it


class RolloutEngine(ABC):
    """Samples from the newest published policy. All methods are coroutines; many `generate` calls run at once."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> list[Completion]:
        """`request.sampling.n` completions, in sample order. An aborted request returns what was produced."""

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

    @property
    @abstractmethod
    def version(self) -> int:
        """The weights in use."""

    def stats(self) -> dict[str, float]:
        """Counters since the last call (tokens, batch occupancy, cache use, time in model and sampling)."""
        return {}
