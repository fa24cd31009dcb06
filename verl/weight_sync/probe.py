"""Whether an engine computes with the trainer's weights: both score the same fixed sequences.

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

TrainerScores = Callable[[Sequence[Sequence[int]]], Awaitable[list[list[float]]]]

# Root mean square, in nats, by which two correct forward passes of one model differ per token.
ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
FURTHEST = 10.0  # times the rounding: more is another model
JUMP = 8.0  # times the largest difference of earlier probes: more is a fault of this publish
SMALLEST = 1e-6  # nats; what is below is rounding in any type


@dataclass(frozen=True)
class Verdict:
    """What the probe of one replica said. Values are root mean squares over tokens, in nats."""

    differs: float  # engine from trainer, same version
    moved: float  # trainer since its last probe; 0 at the first
    too_small: bool  # the trainer moved less than rounding hides: an engine that stayed behind could not be seen


@dataclass
class Probe:
    """Scores `sequences` (fixed token ids) after a publish and compares; remembers the last scores of each replica."""

    sequences: Sequence[Sequence[int]]
    trainer_scores: TrainerScores
    rounding: float = ROUNDING[torch.float32]
    _trainer: Tensor | None = None
    _engines: dict[int, Tensor] = field(default_factory=dict)
    _worst: dict[int, float] = field(default_factory=dict)  # largest accepted difference, by replica

    async def check(self, replicas: Sequence[CopyingEngine], version: int) -> list[Verdict]:
        """One verdict per replica; raises StaleWeightsError that names the first replica that is wrong, and how."""
        trainer = flat(await self.trainer_scores(self.sequences))
        verdicts = []
        for number, replica in enumerate(replicas):
            engine = flat(await replica.score(self.sequences))
            verdicts.append(self._judge(number, version, trainer, engine))
            self._engines[number] = engine
        self._trainer = trainer
        return verdicts

    def _judge(self, number: int, version: int, trainer: Tensor, engine: Tensor) -> Verdict:
        differs, bound = rms(engine - trainer), FURTHEST * self.rounding
        if number in self._worst:
            bound = min(bound, max(JUMP * self._worst[number], SMALLEST))
        moved = 0.0 if self._trainer is None else rms(trainer - self._trainer)
        if not differs <= bound:
            raise StaleWeightsError(
                f"replica {number} does not compute with version {version}: its log-probs of the probe differ from the "
                f"trainer's by {differs:.2e} nats (root mean square; at most {bound:.1e} is rounding). "
                + self._explain(number, moved, engine)
            )
        self._worst[number] = max(differs, self._worst.get(number, 0.0))
        return Verdict(differs, moved, too_small=moved < bound)

    def _explain(self, number: int, moved: float, engine: Tensor) -> str:
        if number not in self._engines or not moved:
            return "Some tensor is wrong or missing in the engine"
        followed = rms(engine - self._engines[number])
        if followed < 0.1 * moved:
            return f"The trainer's moved by {moved:.2e} since the last probe, and the engine stayed where it was"
        return f"The trainer's moved by {moved:.2e}, the engine's by {followed:.2e}: some tensors are old or wrong"


def flat(scores: list[list[float]]) -> Tensor:
    """All scores but the first of each sequence, which is always 0."""
    return torch.tensor([value for sequence in scores for value in sequence[1:]], dtype=torch.float64)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def probe_sequences(vocab_size: int, length: int = 24, count: int = 4, seed: int = 0) -> list[list[int]]:
    """Fixed random token ids: every row of the embedding has the same chance to be looked at."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()
