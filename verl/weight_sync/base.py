"""Trainer to rollout: after `publish(version)` returns, every rollout engine samples from `version`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from verl.weight_sync.logprob_probe import ProbeResult


@dataclass(frozen=True)
class Receipt:
    """Proof that the rollout engines run `version`."""

    version: int
    num_replicas: int
    seconds: float
    bytes_moved: int
    num_tensors: int = 0
    probes: "tuple[ProbeResult, ...]" = ()  # one per replica where this publish was probed


class WeightSync(Protocol):
    """One way to move weights from the trainer to the rollout engines."""

    async def publish(self, version: int) -> Receipt:
        """Hand over the trainer's weights as `version`; returns when every engine samples from them."""
        ...
