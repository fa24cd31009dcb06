"""Trainer to rollout: after `publish(version)` returns, every rollout engine samples from `version`."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Receipt:
    """Proof that the rollout engines run `version`."""

    version: int
    num_replicas: int
    seconds: float
    bytes_moved: int


class WeightSync(Protocol):
    """One way to carry weights from the trainer to the rollout engines."""

    async def publish(self, version: int) -> Receipt:
        """Hand over the trainer's weights as `version`; returns when every engine samples from them."""
        ...
