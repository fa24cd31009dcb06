"""Which ranks hold which roles, decided from the configuration and the devices; and how the ranks are run."""

from collections.abc import Callable
from functools import partial

from verl.config import RunConfig
from verl.config.check import check_batch_divides, uses_critic, uses_reference
from verl.config.distillation import teachers
from verl.config.trainer import TrainerConfig
from verl.plugin.platform import get_platform
from verl.runtime import ray_cluster
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.pools import Pool, WorkerPools
from verl.runtime.processes import ProcessGroup
from verl.runtime.ray_cluster import Devices, join_cluster
from verl.runtime.ray_group import RayGroup
from verl.trainer.preflight import check_devices_asked_for
from verl.trainer.run_header import say
from verl.utils.errors import ConfigError
from verl.workers.rank_workers import RankWorkers, build_rank_workers
from verl.workers.teacher import role_name


def place_roles(config: RunConfig) -> tuple[Pool, ...]:
    """The pools of a run; critic and reference have one of their own with their key `n_gpus_per_node`.

    ConfigError where there are too few devices, or the ranks of a pool cannot share the sequences.
    """
    used = {
        "reference": ("actor_rollout_ref.ref", uses_reference(config), config.actor_rollout_ref.ref.n_gpus_per_node),
        "critic": ("critic", uses_critic(config), config.critic.n_gpus_per_node),
    }
    nodes = config.trainer.nnodes
    apart = {role: (f"{where}.n_gpus_per_node", own) for role, (where, is_used, own) in used.items() if is_used and own}
    shared = [role for role, (_, is_used, own) in used.items() if is_used and not own]
    roles = ["actor", *(role for role in shared if role == "reference"), "rollout"]
    roles += [role_name(teacher.name) for teacher in teachers(config.distillation)]
    roles += [role for role in shared if role == "critic"]
    ranks = nodes * _count_actor_ranks(config, dict(apart.values()))
    check_batch_divides(config, ranks)
    pools = [Pool("actor", tuple(roles), ranks)]
    for role, (_, own) in apart.items():
        pools.append(Pool(role, (role,), nodes * own, first_device=sum(pool.num_ranks for pool in pools)))
    return tuple(pools)


def _count_actor_ranks(config: RunConfig, others: dict[str, int]) -> int:
    """Of one machine, one per device: `trainer.n_gpus_per_node`, or those `others` (by key) leave; one on a CPU."""
    platform, configured, taken = get_platform(), config.trainer.n_gpus_per_node, sum(others.values())
    asked = {"trainer.n_gpus_per_node": configured, **others}
    text = " and ".join(f"{key}={count}" for key, count in asked.items() if count is not None)
    runtime, nodes = chosen_runtime(config.trainer), config.trainer.nnodes
    if runtime != "ray" and nodes > 1:
        raise ConfigError(
            f"trainer.runtime={runtime} is on one machine, but trainer.nnodes={nodes}; use trainer.runtime=ray, or one"
        )
    if runtime == "ray":
        ray_cluster.check_installed()
    if runtime == "inline":
        if (configured or 1) + taken > 1:
            raise ConfigError(
                f"trainer.runtime=inline is one process, but {text}; use trainer.runtime=processes, or one device"
            )
        return 1
    check_devices_asked_for(config.trainer, platform, others)
    if platform.device_name == "cpu":
        return configured or 1
    available = max(platform.device_count(), 1)
    if (configured or 1) + taken > available and runtime != "ray":  # Ray counts its nodes' devices itself
        raise ConfigError(
            f"{text}, but {available} {platform.device_name} devices are visible; "
            f"lower {'their sum' if others else 'it'} to at most {available}"
            + (f", or leave out {' or '.join(others)} to share the actor's" if others else "")
        )
    return configured or max(available - taken, 1)


def chosen_runtime(settings: TrainerConfig) -> str:
    """`trainer.runtime`; auto is ray where several machines or a Ray cluster are asked for, and otherwise stays auto:
    one rank inline, several in processes."""
    asked = settings.nnodes > 1 or ray_cluster.asked_for_by_environment() is not None
    return "ray" if settings.runtime == "auto" and asked else settings.runtime


def start_pools(
    config: RunConfig, total_steps: int, pools: tuple[Pool, ...], announce: Callable[[str], None] = say
) -> WorkerPools:
    """The ranks with their engines: the actor's single rank is this process, all others one process each; with Ray,
    actors of the cluster that `announce` is told about."""
    num_ranks, runtime, platform = sum(pool.num_ranks for pool in pools), chosen_runtime(config.trainer), get_platform()
    leave: Callable[[], None] = lambda: None  # noqa: E731
    if runtime == "ray":
        cluster = join_cluster(config.ray_kwargs.ray_init, config.ray_kwargs.timeline_json_file)
        leave = cluster.leave
        announce(cluster.describe(platform, num_ranks))
    elif runtime == "auto" and (head := ray_cluster.local_head()) is not None:
        announce(f"a Ray head runs on this machine at {head}; trainer.runtime=ray joins it")
    group_name = f"verl-{config.trainer.experiment_name}"

    def start(pool: Pool) -> WorkerGroup:
        name, layout = pool.name if len(pools) > 1 else "", Layout.data_parallel(pool.num_ranks)
        factory = partial(build_rank_workers, config, total_steps, pool.roles)
        if runtime == "ray":
            devices = Devices(platform, config.trainer.nnodes, group_name=f"{group_name}-{pool.name}")
            return RayGroup(factory, layout, devices, name, num_ranks)
        if pool.num_ranks == 1 and "actor" in pool.roles and runtime != "processes":
            return InlineGroup(RankWorkers(config, total_steps, pool.roles))
        stall_timeout_s = config.trainer.stall_timeout_s
        return ProcessGroup(factory, layout, name, pool.first_device, num_ranks, stall_timeout_s)

    return WorkerPools(pools, start, leave)
