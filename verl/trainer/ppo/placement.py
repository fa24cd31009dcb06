"""Which ranks hold which roles, decided from the configuration and the devices of this machine."""

from functools import partial

from verl.config import RunConfig
from verl.config.check import check_batch_divides, uses_critic, uses_reference
from verl.config.distillation import teachers
from verl.plugin.platform import get_platform
from verl.runtime.group import Layout, WorkerGroup
from verl.runtime.inline import InlineGroup
from verl.runtime.pools import Pool, WorkerPools
from verl.runtime.processes import ProcessGroup
from verl.trainer.preflight import check_devices_asked_for
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
    apart = {role: (f"{where}.n_gpus_per_node", own) for role, (where, is_used, own) in used.items() if is_used and own}
    shared = [role for role, (_, is_used, own) in used.items() if is_used and not own]
    roles = ["actor", *(role for role in shared if role == "reference"), "rollout"]
    roles += [role_name(teacher.name) for teacher in teachers(config.distillation)]
    roles += [role for role in shared if role == "critic"]
    ranks = _count_actor_ranks(config, dict(apart.values()))
    check_batch_divides(config, ranks)
    pools = [Pool("actor", tuple(roles), ranks)]
    for role, (_, own) in apart.items():
        pools.append(Pool(role, (role,), own, first_device=sum(pool.num_ranks for pool in pools)))
    return tuple(pools)


def _count_actor_ranks(config: RunConfig, others: dict[str, int]) -> int:
    """One per device: as many as `trainer.n_gpus_per_node` says, or as `others` (by key) leave; one on a CPU."""
    platform, configured, taken = get_platform(), config.trainer.n_gpus_per_node, sum(others.values())
    asked = {"trainer.n_gpus_per_node": configured, **others}
    text = " and ".join(f"{key}={count}" for key, count in asked.items() if count is not None)
    if config.trainer.runtime == "inline":
        if (configured or 1) + taken > 1:
            raise ConfigError(
                f"trainer.runtime=inline is one process, but {text}; use trainer.runtime=processes, or one device"
            )
        return 1
    check_devices_asked_for(config.trainer, platform, others)
    if platform.device_name == "cpu":
        return configured or 1
    available = max(platform.device_count(), 1)
    if (configured or 1) + taken > available:
        raise ConfigError(
            f"{text}, but {available} {platform.device_name} devices are visible; "
            f"lower {'their sum' if others else 'it'} to at most {available}"
            + (f", or leave out {' or '.join(others)} to share the actor's" if others else "")
        )
    return configured or available - taken


def start_pools(config: RunConfig, total_steps: int, pools: tuple[Pool, ...]) -> WorkerPools:
    """The ranks with their engines: the actor's single rank is this process, all others one process each."""
    num_ranks = sum(pool.num_ranks for pool in pools)

    def start(pool: Pool) -> WorkerGroup:
        if pool.num_ranks == 1 and "actor" in pool.roles and config.trainer.runtime != "processes":
            return InlineGroup(RankWorkers(config, total_steps, pool.roles))
        factory = partial(build_rank_workers, config, total_steps, pool.roles)
        name = pool.name if len(pools) > 1 else ""
        return ProcessGroup(factory, Layout.data_parallel(pool.num_ranks), name, pool.first_device, num_ranks)

    return WorkerPools(pools, start)
