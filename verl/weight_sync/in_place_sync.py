"""In-place sync: the native engine uses the trainer's own tensors, so a publish only sets the version.

If the engine holds copies (another dtype, merged weights, oneDNN layout), it refreshes and verifies them.
"""

import time

from torch import nn

from verl.weight_sync.base import Receipt
from verl.workers.rollout.base import RolloutEngine, StaleWeightsError


class InPlaceSync:
    """Hands the actor's own module to an engine of the same process."""

    def __init__(self, model: nn.Module, engine: RolloutEngine):
        self.model, self.engine = model, engine

    async def publish(self, version: int) -> Receipt:
        """Make the engine sample from the module's current values as `version`; the error names a copy that differs."""
        start = time.perf_counter()
        await self.engine.wake()
        await self.engine.update_weights(self.model, version)
        if self.engine.version != version:
            raise StaleWeightsError(
                f"published version {version}, but the rollout engine says it samples from {self.engine.version}"
            )
        return Receipt(
            version, num_replicas=1, seconds=time.perf_counter() - start, bytes_moved=self.engine.copied_bytes
        )
