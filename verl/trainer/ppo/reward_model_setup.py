"""The reward model of a run, on ranks or in servers."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from verl.config import RunConfig
from verl.config.reward import reward_model_place
from verl.placement.plan import Plan
from verl.plugin.platform import get_platform
from verl.rewards.base import Reward
from verl.rewards.model_setup import ROUTER_ADDRESS, takes_turns
from verl.rewards.reward_servers import PlannedServer, RewardServers, planned_servers, start_servers
from verl.rewards.reward_setup import build_reward
from verl.rewards.servers_on_nodes import Factory, start_servers_on_nodes
from verl.runtime.group import ObjectOnNode
from verl.runtime.pools import WorkerPools
from verl.trainer.ppo.preparation import Preparation
from verl.trainer.ppo.sources.trajectory_source import RewardModelServing
from verl.workers.reward_model import RewardModel
from verl.workers.rollout.remote.process import DriversSettings


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
) -> tuple[RewardModelServing | None, Reward]:
    """The reward model or the judge of a run, which can be asked from now on, and the reward, which knows where;
    `started` closes what starts here."""
    model = prepared.model_reward
    if (place := reward_model_place(config.reward)) is None:
        return None, prepared.reward
    if place == "ranks":
        assert model is not None
        model.backend = ScoringRanks(RewardModel(config, pools.for_role("reward_model")))
        return model, prepared.reward
    servers = _start_servers(config, prepared, pools, started)
    if model is not None:
        model.backend = servers
        return model, prepared.reward
    address = {ROUTER_ADDRESS: servers.servers[0].address}
    if address.items() <= prepared.judge_keywords.items():
        return servers, prepared.reward
    return servers, build_reward(config, prepared.tokenizer, None, {**prepared.judge_keywords, **address})


def _start_servers(config: RunConfig, prepared: Preparation, pools: WorkerPools, started: ExitStack) -> RewardServers:
    plan, sleeps = prepared.facts.placement, takes_turns(config.reward, get_platform().device_name != "cpu")
    assert plan.reward_servers is not None
    places = plan.places(plan.reward_servers)
    if plan.runtime != "ray":
        return start_servers(config.reward, places, prepared.judge_port, sleeps, started)
    planned, hold = planned_servers(config.reward, places, sleeps), partial(_hold, config, plan, pools)
    settings = DriversSettings.on(get_platform())
    return start_servers_on_nodes(config.reward.reward_model, planned, hold, settings, started)


def _hold(config: RunConfig, plan: Plan, pools: WorkerPools, planned: PlannedServer, factory: Factory) -> ObjectOnNode:
    """The object of a server on its machine: for the devices of the actor's ranks, or for others of the cluster.

    A judge is asked from the driver's machine, or from all where the manager calls the function on all.
    """
    assert plan.reward_servers is not None
    group, node, devices = pools.group_of("actor"), planned.node, planned.devices
    for_all = planned.is_judge and config.reward.reward_manager.name == "remote"
    if plan.reward_servers.pool != "actor":
        return group.hold(factory, node, num_devices=len(devices), for_all=for_all)
    first = node * plan.pools[0].per_node
    return group.hold(factory, node, [first + device for device in devices], for_all=for_all)
