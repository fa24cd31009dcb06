"""Weight sync, trainer to rollout: after `publish(version)` returns, every rollout engine samples from `version`."""

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
    probes: "tuple[ProbeResult, ...]" = ()  # one per replica if this publish was probed
    num_read_back: int = 0  # tensors that every replica's layers were shown to compute with
    unread: tuple[str, ...] = ()  # parameters of the engine that only the probe checks
    pause_s: float | None = (
        None  # seconds in which the rollout could not sample, of the slowest replica; None: not known
    )

    def warning(self) -> str:
        """Says what only the probe checks; empty if every parameter of the engine was read back."""
        if not self.num_tensors or (self.num_read_back and not self.unread):
            return ""
        what = f"{len(self.unread)} of its parameters (first {self.unread[0]})" if self.num_read_back else "its weights"
        return (
            f"warning: after a publish the rollout engine does not show {what}; only the log-prob probe checks them, "
            "at every rollout.checkpoint_engine.probe_every-th publish (docs/scale/weight_sync.md)"
        )

    def metrics(self) -> dict[str, float]:
        """The receipt as metrics of the step that published; empty for an engine in place, which sends nothing."""
        if not self.num_tensors:
            return {}
        values: dict[str, float] = {
            "weight_sync/bytes_moved": self.bytes_moved,
            "weight_sync/tensors_sent": self.num_tensors,
            "weight_sync/tensors_read_back": self.num_read_back,
            "weight_sync/parameters_not_read_back": len(self.unread),
        }
        if self.pause_s is not None:
            values["weight_sync/pause_s"] = self.pause_s
        if self.probes:
            values["weight_sync/probe_difference"] = max(probe.difference for probe in self.probes)
            values["weight_sync/probe_bound"] = self.probes[0].bound
        return values


class WeightSync(Protocol):
    """Publishes the trainer's weights to the rollout engines."""

    async def publish(self, version: int) -> Receipt:
        """Publish the trainer's weights as `version`; returns when every engine samples from them."""
        ...
