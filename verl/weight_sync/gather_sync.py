"""Ranks that train in shards sample from a whole copy: publishing gathers it on each of them."""

import time

from verl.weight_sync.base import Receipt
from verl.workers.ranks_engine import MultiRankRolloutEngine
from verl.workers.rollout.base import StaleWeightsError


class GatherSync:
    """Every rank takes the actor's weights, tensor by tensor, into the copy it samples from."""

    def __init__(self, engine: MultiRankRolloutEngine):
        self.engine = engine

    async def publish(self, version: int) -> Receipt:
        """Returns when every rank samples from the actor's present weights as `version`."""
        start = time.perf_counter()
        bytes_moved = await self.engine.publish(version)
        if self.engine.version != version:
            raise StaleWeightsError(
                f"published version {version}, but a rank says it samples from {self.engine.version}"
            )
        ranks = self.engine.group.layout.world_size
        return Receipt(version, num_replicas=ranks, seconds=time.perf_counter() - start, bytes_moved=bytes_moved)
