"""Which ranks hold which roles, decided from the configuration and the devices; and how the ranks are run."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from verl.config import RunConfig
from verl.config.check import check_values_can_start
from verl.observe.profiling.nsys import command_of_rank, uses_nsys, worker_options
from verl.placement.devices import check_devices_asked_for, chosen_runtime, report_local_head
from verl.placement.memory import PoolMemory, count_roles, estimate_memory
from verl.placement.plan import (
    REWARD_MODEL,
    ROLLOUT,
    Machine,
    Plan,
    devices_beside_actor,
    plan_placement,
    splits_rollout,
)
from verl.placement.tables import log_lines
from verl.plugin.platform import get_platform
from verl.runtime import ray_cluster
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.pools import Pool, WorkerPools, describe_pools
from verl.runtime.processes import ProcessGroup
from verl.runtime.ray_cluster import Devices, join_cluster, release, reserve
from verl.runtime.ray_group import RayGroup
from verl.utils.errors import ConfigError
from verl.workers.rank_workers import RankWorkers, build_rank_workers
from verl.workers.rollout.engines import rollout_engine_of
from verl.workers.rollout.registry import Weights

logger = logging.getLogger(__name__)


def plan_run(config: RunConfig) -> Plan:
    """The plan of a run on this machine; ConfigError where it is impossible, has too few devices here, or is one that
    this version cannot start.

    Of several replicas that nobody asked for by number, beside ranks on Ray, it has the one that can start, where the
    engine starts none on other machines.
    """
    check_values_can_start(config)
    platform, runtime = get_platform(), chosen_runtime(config.trainer)
    if runtime == "ray":
        ray_cluster.check_installed()
    plan = plan_placement(config, Machine(platform.device_name, platform.device_count()), runtime)
    check_devices_asked_for(config.trainer, platform, dict(devices_beside_actor(config).values()))
    arr = config.actor_rollout_ref
    alone = runtime == "ray" and arr.rollout.num_replicas is None and not splits_rollout(config)
    if alone and _has_copies_on_devices(config, plan) and not rollout_engine_of(arr).traits.starts_on_nodes:
        plan = replace(plan, replicas=(replace(plan.rollout, count=1), *plan.replicas[1:]))
    _check_replicas_can_start(config, plan)
    _check_reward_model_can_start(config, plan)
    return plan


def pools_of(plan: Plan) -> tuple[Pool, ...]:
    """The ranks of a plan; critic and reference have a pool of their own with their key `n_gpus_per_node`."""
    servers = [made.pool for made in plan.replicas if made.pool != "actor"]  # replicas are no ranks
    return tuple(pool for pool in plan.pools if pool.name not in servers)


def announce_plan(config: RunConfig, plan: Plan, announce: Callable[[str], None]) -> list[PoolMemory]:
    """Tell `announce` one line a pool, where there are several ranks: its devices, roles and memory, which it returns;
    nothing for one rank on a CPU, or where the memory is not known."""
    platform = get_platform()
    memory: list[PoolMemory] = []
    if log_lines(plan) or platform.device_name != "cpu":
        try:
            size = None if platform.device_name == "cpu" else platform.total_memory()
            memory = estimate_memory(config, plan, count_roles(config, plan), size)
        except Exception:  # of any library: loading the model says what is wrong with it
            logger.debug("the memory of the placement is not known", exc_info=True)
    for line in log_lines(plan, memory):
        announce(line)
    return memory


def _has_copies_on_devices(config: RunConfig, plan: Plan) -> bool:
    """Whether the rollout's engine has weights of its own, on counted devices."""
    return plan.rollout.on_devices and rollout_engine_of(config.actor_rollout_ref).weights is Weights.COPIED


def _check_reward_model_can_start(config: RunConfig, plan: Plan) -> None:
    """ConfigError for a reward model that `verl plan` plans and a run cannot start."""
    key, count = f"{REWARD_MODEL}.rollout.data_parallel_size", config.reward.reward_model.rollout.data_parallel_size
    if plan.reward_servers is not None and count > 1:
        raise ConfigError(f"{key}={count} is planned by `verl plan`, but a run starts its servers with 1; set it to 1")


def _check_replicas_can_start(config: RunConfig, plan: Plan) -> None:
    """ConfigError for replicas of such an engine that `verl plan` plans and a run cannot start."""
    replicas, name = plan.rollout, config.actor_rollout_ref.rollout.name
    if not _has_copies_on_devices(config, plan):
        return
    spans_machines = plan.runtime == "ray" and replicas.size > plan.rollout_pool.per_node
    if replicas.data > 1 and (spans_machines or name != "vllm"):
        asked = config.actor_rollout_ref.rollout.num_replicas
        then = f", which makes {replicas.count * replicas.data} replicas" if asked is None else ""
        raise ConfigError(
            f"{ROLLOUT}.data_parallel_size={replicas.data} with rollout.name={name} and {replicas.size} devices a "
            f"replica is planned by `verl plan`, but a run starts such replicas of rollout.name=vllm on one machine "
            f"({plan.rollout_pool.per_node} devices) only; set {ROLLOUT}.data_parallel_size=1{then}"
        )
    splits, starts_on_nodes = splits_rollout(config), rollout_engine_of(config.actor_rollout_ref).traits.starts_on_nodes
    if plan.runtime == "ray" and (replicas.count > 1 or splits) and not starts_on_nodes:
        key = "actor_rollout_ref.hybrid_engine=False or rollout.nnodes" if splits else f"{ROLLOUT}.num_replicas"
        raise ConfigError(
            f"{key} with rollout.name={name} on Ray is planned by `verl plan`, but there this version starts one "
            "replica of it, on the driver's machine; drop it, use trainer.runtime=processes on one machine, or "
            "rollout.name=vllm or native"
        )


def devices_apart(plan: Plan) -> tuple[list[int], str]:
    """(devices per machine that a rollout and a reward model have to themselves, the same in words); empty without."""
    counts, words = [0] * plan.num_nodes, []
    for pool in plan.pools:
        if pool.roles in (("rollout",), ("reward_model",)):
            words.append(f"{pool.num_devices} devices for the {pool.name.replace('_', ' ')}")
            for node in range(pool.first_node, pool.first_node + pool.nodes):
                counts[node] += pool.per_node
    return (counts, " and " + " and ".join(words)) if words else ([], "")


def is_this_process(pool: Pool, runtime: str) -> bool:
    """Whether the ranks of `pool` are the driver's own process."""
    return pool.num_devices == 1 and "actor" in pool.roles and runtime not in ("processes", "ray")


def start_pools(config: RunConfig, total_steps: int, plan: Plan, announce: Callable[[str], None]) -> WorkerPools:
    """The ranks with their engines: the actor's single rank is this process, all others one process each; with Ray,
    actors of the cluster that `announce` is told about."""
    pools, runtime, platform = pools_of(plan), plan.runtime, get_platform()
    num_ranks = sum(pool.num_devices for pool in pools)
    settings, share = config.trainer, config.ray_kwargs.devices_per_rank
    stall_timeout_s, group_name = settings.stall_timeout_s, f"verl-{settings.experiment_name}"
    devices = Devices(platform, settings.nnodes, share, group_name, settings.node_wait_s)
    reserved: Any = None

    def start(pool: Pool) -> WorkerGroup:
        name, layout = pool.name if len(pools) > 1 else "", Layout.data_parallel(pool.num_devices)
        factory = partial(build_rank_workers, config, total_steps, pool.roles)
        launcher = partial(command_of_rank, config, pool.roles)
        if runtime == "ray":
            nsight = worker_options(config) if any(map(launcher, range(pool.num_devices))) else None
            there = replace(devices, num_nodes=pool.nodes, first_node=pool.first_node)
            return RayGroup(factory, layout, there, name, num_ranks, stall_timeout_s, reserved, nsight)
        if is_this_process(pool, runtime):
            return InlineGroup(RankWorkers(config, total_steps, pool.roles))
        limit_s = 0.0 if uses_nsys(config) else stall_timeout_s  # the process that is watched would be that of nsys
        return ProcessGroup(factory, layout, name, pool.first_device, num_ranks, limit_s, launcher)

    with ExitStack() as ending:
        if runtime == "ray":
            cluster = join_cluster(config.ray_kwargs.ray_init, config.ray_kwargs.timeline_json_file)
            ending.callback(cluster.leave)
            apart, others = devices_apart(plan)
            near = [pool for pool in pools if pool.name != "reward_model"]  # the others' devices are in `apart`
            ranks = sum(pool.num_devices for pool in near)
            announce(cluster.describe(platform, ranks + sum(apart)))
            beside = sum(pool.num_devices for pool in near if pool.name != "actor") // settings.nnodes
            reserved = reserve(devices, ranks, f"the run of {describe_pools(near)}{others}", beside, apart)
            ending.callback(release, reserved)
        else:
            report_local_head(config.trainer, announce)
        return WorkerPools(pools, start, ending.pop_all().close)
