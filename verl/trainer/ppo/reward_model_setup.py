"""The reward model of a run, on ranks or in servers."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from verl.config import RunConfig
from verl.rewards.model_reward import ScoringBackend
from verl.runtime.pools import WorkerPools
from verl.workers.reward_model import RewardModel


class ScoringRanks:
    """A reward model on ranks. In this process it computes on the thread that waits for it."""

    def __init__(self, model: RewardModel):
        self.model = model

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        if self.model.is_here:
            return self.model.scores(sequences)
        return await asyncio.to_thread(self.model.scores, sequences)

    async def wake(self) -> None:
        """Nothing: `fsdp_config.param_offload` loads the weights for a pass."""

    async def sleep(self) -> None:
        """Nothing, as above."""


def start_scoring(config: RunConfig, pools: WorkerPools, started: ExitStack) -> ScoringBackend:
    """Where the reward model of the run computes; `started` closes what starts here."""
    return ScoringRanks(RewardModel(config, pools.for_role("reward_model")))
