"""What a rollout engine did, for tests."""

import asyncio
from collections.abc import Sequence

from verl.workers.rollout.base import RolloutEngine
from verl.workers.rollout.engine_stats import EngineStats, metrics_between


def work_of(engine: RolloutEngine, before: Sequence[EngineStats] = ()) -> dict[str, float]:
    """The metrics of what `engine` did since its start, or since the reading `before`."""
    return metrics_between(before, asyncio.run(engine.stats()))
