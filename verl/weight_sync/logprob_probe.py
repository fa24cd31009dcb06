"""Whether an engine computes with the trainer's weights: both compute log-probs of the same fixed sequences.

A digest proves that bytes arrived; only the engine's own forward pass proves that it uses them. Two correct passes of
one model differ by rounding, much the same from version to version: the first probe is held to what its type can round,
later ones to what was seen before, which shows far smaller faults. How the trainer moved since its last probe tells a
stale engine from a wrong one.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from verl.workers.rollout.base import CopyingEngine, StaleWeightsError

TrainerLogprobs = Callable[[Sequence[Sequence[int]]], Awaitable[list[list[float]]]]

# Root mean square, in nats, by which two correct forward passes of one model differ per token.
ROUNDING_RMS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
MAX_ROUNDINGS = 10.0  # times the rounding: more is another model
MAX_GROWTH = 8.0  # times the largest difference of earlier probes: more is a fault of this publish
ROUNDING_FLOOR = 1e-6  # nats; what is below is rounding in any type


@dataclass(frozen=True)
class ProbeResult:
    """What the probe of one replica said. Values are root mean squares over tokens, in nats."""

    difference: float  # engine from trainer, same version
    trainer_change: float  # trainer since its last probe; 0 at the first
    change_too_small: bool  # the trainer moved less than rounding hides: a stale engine could not be seen


@dataclass
class LogprobProbe:
    """Computes log-probs of `sequences` (fixed token ids) after a publish and compares them.

    Remembers the last ones of each replica.
    """

    sequences: Sequence[Sequence[int]]
    trainer_logprobs: TrainerLogprobs
    rounding: float = ROUNDING_RMS[torch.float32]
    _trainer: Tensor | None = None
    _engines: dict[int, Tensor] = field(default_factory=dict)
    _worst: dict[int, float] = field(default_factory=dict)  # largest accepted difference, by replica

    async def check(self, replicas: Sequence[CopyingEngine], version: int) -> list[ProbeResult]:
        """One result per replica; raises StaleWeightsError that names the first replica that is wrong, and how."""
        trainer = flat_logprobs(await self.trainer_logprobs(self.sequences))
        results = []
        for number, replica in enumerate(replicas):
            engine = flat_logprobs(await replica.compute_logprobs(self.sequences))
            results.append(self._check_replica(number, version, trainer, engine))
            self._engines[number] = engine
        self._trainer = trainer
        return results

    def _check_replica(self, number: int, version: int, trainer: Tensor, engine: Tensor) -> ProbeResult:
        difference, bound = rms(engine - trainer), MAX_ROUNDINGS * self.rounding
        if number in self._worst:
            bound = min(bound, max(MAX_GROWTH * self._worst[number], ROUNDING_FLOOR))
        trainer_change = 0.0 if self._trainer is None else rms(trainer - self._trainer)
        if not difference <= bound:
            raise StaleWeightsError(
                f"replica {number} does not compute with version {version}: its log-probs of the probe differ from the "
                f"trainer's by {difference:.2e} nats (root mean square; at most {bound:.1e} is rounding). "
                + self._explain(number, trainer_change, engine)
            )
        self._worst[number] = max(difference, self._worst.get(number, 0.0))
        return ProbeResult(difference, trainer_change, change_too_small=trainer_change < bound)

    def _explain(self, number: int, trainer_change: float, engine: Tensor) -> str:
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
    """Fixed random token ids: every row of the embedding has the same chance to be looked at."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()
