"""Gather sync: every rank of a sharded trainer samples from a full copy, which a publish gathers on it."""

import time

from verl.weight_sync.base import Receipt
from verl.workers.ranks_engine import MultiRankRolloutEngine
from verl.workers.rollout.base import StaleWeightsError


class GatherSync:
    """Gathers the actor's weights, tensor by tensor, into the copy that each rank samples from."""

    def __init__(self, engine: MultiRankRolloutEngine):
        self.engine = engine

    async def publish(self, version: int) -> Receipt:
        """Returns when every rank samples from the actor's current weights as `version`."""
        start = time.perf_counter()
        bytes_moved = await self.engine.publish(version)
        if self.engine.version != version:
            raise StaleWeightsError(
                f"published version {version}, but a rank says it samples from {self.engine.version}"
            )
        ranks = self.engine.group.layout.world_size
        return Receipt(version, num_replicas=ranks, seconds=time.perf_counter() - start, bytes_moved=bytes_moved)
