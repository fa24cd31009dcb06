"""Checks that an engine computes with the trainer's weights: both compute log-probs of the same fixed sequences.

A fingerprint proves which weights a layer holds; only the engine's forward pass proves that the layers compute what the
trainer's do. Two correct passes of one model differ by rounding. How much follows from arithmetic: at every probe the
trainer runs the same weights a second time, cast to the engine's dtype (or to a wider one, if it computes in the
engine's dtype already), and the bound is a multiple of that difference. It never depends on what the engine showed.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.workers.rollout.base import CopyingEngine, StaleWeightsError

TrainerLogprobs = Callable[[Sequence[Sequence[int]]], Awaitable[list[list[float]]]]

# Root mean square, in nats, by which two correct forward passes of one model differ per token, where the trainer cannot
# run in another dtype (its parameters are sharded).
ROUNDING_RMS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
MAX_ROUNDINGS = 8.0  # times the rounding; above it, the engine runs another model
# Nats; a smaller difference is rounding, whatever the cast shows: kernels approximate exp by some units in last place.
ROUNDING_FLOOR = {torch.float32: 2e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}


@dataclass(frozen=True)
class ProbeResult:
    """Result of probing one replica. Values are root mean squares over tokens, in nats."""

    difference: float  # between engine and trainer, same version
    bound: float  # largest difference that is rounding


@dataclass
class LogprobProbe:
    """Computes log-probs of `sequences` (fixed token ids) after a publish and compares them.

    `cast_logprobs`: the trainer's log-probs with its weights in another dtype; None if it cannot compute them.
    """

    sequences: Sequence[Sequence[int]]
    trainer_logprobs: TrainerLogprobs
    cast_logprobs: TrainerLogprobs | None = None
    dtype: torch.dtype = torch.float32  # of the engine
    _trainer: Tensor | None = None  # of the last probe: an error tells a stale engine from a wrong one
    _engines: dict[int, Tensor] = field(default_factory=dict)

    async def check(
        self, replicas: Sequence[CopyingEngine], version: int, numbers: Sequence[int] | None = None
    ) -> list[ProbeResult]:
        """One result per replica; raises StaleWeightsError naming the first wrong replica and the difference.

        `numbers`: of the replicas, where they are not the first ones.
        """
        trainer = flat_logprobs(await self.trainer_logprobs(self.sequences))
        bound = MAX_ROUNDINGS * await self._rounding(trainer)
        results = []
        for number, replica in zip(numbers or range(len(replicas)), replicas, strict=True):
            engine = flat_logprobs(await replica.compute_logprobs(self.sequences)).view(-1, len(trainer))
            by_rank = [rms(logprobs - trainer) for logprobs in engine]  # data-parallel ranks
            difference = max(by_rank, key=lambda one: (math.isnan(one), one))
            if not difference <= bound:
                which = f" (data-parallel rank {by_rank.index(difference)})" if len(by_rank) > 1 else ""
                raise StaleWeightsError(
                    f"replica {number}{which} does not compute with version {version}: its log-probs of the probe "
                    f"differ from the trainer's by {difference:.2e} nats (root mean square; at most {bound:.1e} is "
                    "rounding). " + self._explain(number, trainer, engine)
                )
            results.append(ProbeResult(difference, bound))
            self._engines[number] = engine
        self._trainer = trainer
        return results

    async def _rounding(self, trainer: Tensor) -> float:
        """Root mean square, in nats, of what rounding changes at the trainer's current weights."""
        if self.cast_logprobs is None:
            return ROUNDING_RMS[self.dtype]
        cast = flat_logprobs(await self.cast_logprobs(self.sequences))
        return max(rms(cast - trainer), ROUNDING_FLOOR[self.dtype])

    def _explain(self, number: int, trainer: Tensor, engine: Tensor) -> str:
        trainer_change = 0.0 if self._trainer is None else rms(trainer - self._trainer)
        if number not in self._engines or not trainer_change:
            return "Some tensor is wrong or missing in the engine"
        engine_change = rms(engine - self._engines[number])
        if engine_change < 0.1 * trainer_change:
            return (
                f"The trainer's moved by {trainer_change:.2e} since the last probe, and the engine stayed where it was"
            )
        return (
            f"The trainer's moved by {trainer_change:.2e}, "
            f"the engine's by {engine_change:.2e}: some tensors are old or wrong"
        )


def flat_logprobs(logprobs: list[list[float]]) -> Tensor:
    """All log-probs but the first of each sequence, which is always 0."""
    return torch.tensor([value for sequence in logprobs for value in sequence[1:]], dtype=torch.float64)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def probe_sequences(vocab_size: int, length: int = 24, count: int = 4, seed: int = 0) -> list[list[int]]:
    """Fixed random token ids: every row of the embedding is equally likely to be checked."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()
