"""The reward model of a run, on ranks or in servers."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from verl.config import RunConfig
from verl.config.reward import reward_model_place
from verl.plugin.platform import get_platform
from verl.rewards.model_setup import takes_turns
from verl.rewards.reward_servers import start_servers
from verl.runtime.pools import WorkerPools
from verl.trainer.ppo.placement import plan_run
from verl.trainer.ppo.preparation import Preparation
from verl.trainer.ppo.trajectory_source import RewardModelServing
from verl.workers.reward_model import RewardModel


class ScoringRanks:
    """A reward model on ranks. In this process it computes on the thread that waits for it."""

    def __init__(self, model: RewardModel):
        self.model = model

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        if self.model.is_here:
            return self.model.scores(sequences)
        return await asyncio.to_thread(self.model.scores, sequences)

    def metrics(self) -> dict[str, float]:
        """reward_model/perf/*memory*_gb of the last pass, the maximum over ranks."""
        return self.model.dispatcher.forward_memory.with_prefix("reward_model/").values()

    async def wake(self) -> None:
        """Nothing: `fsdp_config.param_offload` loads the weights for a pass."""

    async def sleep(self) -> None:
        """Nothing, as above."""


def start_reward_model(
    config: RunConfig, prepared: Preparation, pools: WorkerPools, started: ExitStack
) -> RewardModelServing | None:
    """The reward model or the judge of a run, which can be asked from now on; `started` closes what starts here."""
    model = prepared.model_reward
    if (place := reward_model_place(config.reward)) is None:
        return None
    if place == "ranks":
        assert model is not None
        model.backend = ScoringRanks(RewardModel(config, pools.for_role("reward_model")))
        return model
    plan, sleeps = plan_run(config), takes_turns(config.reward, get_platform().device_name != "cpu")
    assert plan.reward_servers is not None
    devices = [devices for _, devices in plan.places(plan.reward_servers)]
    servers = start_servers(config.reward, devices, prepared.judge_port, sleeps, started)
    if model is None:
        return servers
    model.backend = servers
    return model
