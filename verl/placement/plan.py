"""Which role sits on which devices: decided here, from the configuration and the machine alone, before anything starts.

Runs, `verl plan` and the lines of a run's log all ask `plan_placement`.
"""

import math
from dataclasses import dataclass, replace

from verl.config import RunConfig
from verl.config.check import check_batch_divides, uses_critic, uses_reference
from verl.config.distillation import role_name, teachers
from verl.config.reward import reward_model_place
from verl.config.rollout import RolloutConfig
from verl.runtime.pools import Pool
from verl.utils.errors import ConfigError
from verl.workers.rollout.engines import rollout_engine_of
from verl.workers.rollout.registry import Weights

ROLLOUT = "actor_rollout_ref.rollout"
REWARD_MODEL = "reward.reward_model"
DEVICES, ACTOR_DEVICES = "n_gpus_per_node", "trainer.n_gpus_per_node"


@dataclass(frozen=True)
class Machine:
    """The nodes that a plan is for: `devices` of one `kind` on each; None: as many as are asked for."""

    kind: str
    devices: int | None = None


@dataclass(frozen=True)
class Replicas:
    """The `count` replicas of `role` in a pool, each of `tensor` x `data` devices.

    `on_devices`: on those of the pool, in order; otherwise in processes whose devices nobody counts (CPUs, servers).
    """

    role: str
    pool: str
    count: int
    tensor: int = 1
    data: int = 1
    on_devices: bool = True

    @property
    def size(self) -> int:
        return self.tensor * self.data


@dataclass(frozen=True)
class Plan:
    """Every role of a run on its devices. `notes`: what the user should know about it."""

    machine: Machine
    runtime: str
    pools: tuple[Pool, ...]
    replicas: tuple[Replicas, ...]
    notes: tuple[str, ...] = ()
    devices_per_rank: float = 1.0  # below 1, Ray lets ranks share devices, and picks which

    @property
    def num_nodes(self) -> int:
        return max(pool.first_node + pool.nodes for pool in self.pools)

    @property
    def num_devices(self) -> int:
        """The devices of all pools, those of a rollout apart too."""
        return sum(pool.num_devices for pool in self.pools)

    @property
    def rollout(self) -> Replicas:
        return self.replicas[0]

    @property
    def rollout_pool(self) -> Pool:
        return next(pool for pool in self.pools if pool.name == self.rollout.pool)

    @property
    def reward_servers(self) -> Replicas | None:
        """The servers of a reward model or a judge, if there are any."""
        return next((made for made in self.replicas if made.role == "reward_model"), None)

    @property
    def rollout_places(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Machine and devices of each rollout replica, as `places`."""
        return self.places(self.rollout)

    def places(self, made: Replicas) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The machine of each replica, of several its first, and the indices of its devices there.

        Where none are counted, replicas are divided evenly over the pool's machines.
        """
        pool = next(pool for pool in self.pools if pool.name == made.pool)
        if not made.on_devices:
            return tuple((pool.first_node + number * pool.nodes // made.count, ()) for number in range(made.count))
        each, per_replica = max(pool.per_node // made.size, 1), max(made.size // pool.per_node, 1)
        places = []
        for number in range(made.count):
            node, start = number // each * per_replica, pool.first_device + number % each * made.size
            places.append((pool.first_node + node, tuple(range(start, start + made.size))))
        return tuple(places)

    @property
    def rollout_devices(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the devices of each rollout replica, of one machine; none where they are not counted."""
        return tuple(devices for _, devices in self.rollout_places) if self.rollout.on_devices else ()


def plan_placement(config: RunConfig, machine: Machine, runtime: str = "auto") -> Plan:
    """The placement of a run with `trainer.runtime=runtime` (auto: chosen already where it matters) on such machines.

    ConfigError, with the numbers and the nearest plan that works, where there is none.
    """
    pools, notes = _place_pools(config, machine, runtime), list[str]()
    holder = {role: pool for pool in pools for role in pool.roles}
    replicas = [_rollout_replicas(config, holder["rollout"], machine, runtime, notes)]
    if "reward_model" in holder and reward_model_place(config.reward) != "ranks":
        replicas.append(_reward_replicas(config, holder["reward_model"], machine))
    notes += _mesh_notes(config, holder)
    share = config.ray_kwargs.devices_per_rank if runtime == "ray" else 1.0
    plan = Plan(machine, runtime, tuple(pools), tuple(replicas), tuple(notes), share)
    if plan.num_nodes > 1 and runtime in ("inline", "processes"):
        raise ConfigError(
            f"the pools ({', '.join(f'{p.name} {p.nodes} x {p.per_node}' for p in pools)}) take {plan.num_nodes} "
            f"machines{f' of {machine.devices} devices' if machine.devices else ''}, and trainer.runtime={runtime} is "
            "on one; use trainer.runtime=ray"
        )
    return plan


def _mesh_notes(config: RunConfig, holder: dict[str, Pool]) -> list[str]:
    """Notes of what the ranks of each model divide besides data and shards; ConfigError where they cannot."""
    sections = {"actor": config.actor_rollout_ref.actor, "reference": config.actor_rollout_ref.ref}
    sections |= {"critic": config.critic} if "critic" in holder else {}
    meshes = {role: part.engine.mesh(holder[role].num_devices) for role, part in sections.items() if role in holder}
    return [f"the ranks of the {role} are {mesh}" for role, mesh in meshes.items() if mesh.experts > 1]


def _place_pools(config: RunConfig, machine: Machine, runtime: str) -> list[Pool]:
    """The actor's pool, those beside it on the same machines, and those on machines of their own."""
    beside, far, nodes = devices_beside_actor(config), _pools_on_own_nodes(config), config.trainer.nnodes
    per_node = _count_actor_devices(config, machine, runtime, beside, sum(pool.per_node for pool in far))
    check_batch_divides(config, nodes * per_node)
    pools = [Pool("actor", _actor_roles(config, {*beside}), per_node, nodes)]
    for role, (_, count) in beside.items():
        pools.append(Pool(role, (role,), count, nodes, sum(pool.per_node for pool in pools)))
    for pool in far:
        pools.append(_first_fit(pool, pools, machine))
    return pools


def splits_rollout(config: RunConfig) -> bool:
    """Whether the rollout has devices of its own."""
    return not config.actor_rollout_ref.hybrid_engine or config.actor_rollout_ref.rollout.nnodes > 0


def devices_beside_actor(config: RunConfig) -> dict[str, tuple[str, int]]:
    """Role -> (key, devices per machine) of the roles with devices of their own on the actor's machines."""
    arr = config.actor_rollout_ref
    given = {
        "reference": (f"actor_rollout_ref.ref.{DEVICES}", uses_reference(config) and arr.ref.n_gpus_per_node),
        "critic": (f"critic.{DEVICES}", uses_critic(config) and config.critic.n_gpus_per_node),
    }
    if splits_rollout(config) and not arr.rollout.nnodes:
        given["rollout"] = (f"{ROLLOUT}.{DEVICES}", _rollout_devices(config))
    return {role: (key, count) for role, (key, count) in given.items() if count}


def _rollout_devices(config: RunConfig) -> int:
    """Devices of each machine for a rollout that has its own."""
    count = config.actor_rollout_ref.rollout.n_gpus_per_node
    if count is None:
        raise ConfigError(
            "the rollout has devices of its own (actor_rollout_ref.hybrid_engine=False or rollout.nnodes); say "
            f"how many of a machine's with {ROLLOUT}.{DEVICES}=N, and with {ACTOR_DEVICES} those of the trainer"
        )
    return count


def _pools_on_own_nodes(config: RunConfig) -> list[Pool]:
    """Pools of `nnodes` machines of their own, not placed yet."""
    nodes, reward, out = config.actor_rollout_ref.rollout.nnodes, config.reward.reward_model, []
    if nodes:
        out.append(Pool("rollout", ("rollout",), _rollout_devices(config), nodes))
    if reward.enable and reward.enable_resource_pool:
        if not reward.nnodes:
            raise ConfigError(
                f"{REWARD_MODEL}.enable_resource_pool=True needs {REWARD_MODEL}.nnodes of 1 or more, and it is 0; set "
                "it, or drop enable_resource_pool to share the actor's devices"
            )
        out.append(Pool("reward_model", ("reward_model",), reward.n_gpus_per_node, reward.nnodes))
    return out


def _actor_roles(config: RunConfig, apart: set[str]) -> tuple[str, ...]:
    """The roles that share the actor's devices."""
    reward = config.reward.reward_model
    present = {
        "actor": True,
        "reference": uses_reference(config) and "reference" not in apart,
        "rollout": not splits_rollout(config),
        **{role_name(teacher.name): True for teacher in teachers(config.distillation)},
        "critic": uses_critic(config) and "critic" not in apart,
        "reward_model": reward.enable and not reward.enable_resource_pool,
    }
    return tuple(role for role, is_present in present.items() if is_present)


def _count_actor_devices(
    config: RunConfig, machine: Machine, runtime: str, beside: dict[str, tuple[str, int]], far: int
) -> int:
    """The actor's devices on one machine: `trainer.n_gpus_per_node`, or what the other pools leave; one on a CPU."""
    configured, nodes, others = config.trainer.n_gpus_per_node, config.trainer.nnodes, dict(beside.values())
    taken, asked = sum(others.values()), {ACTOR_DEVICES: configured, **others}
    text = " and ".join(f"{key}={count}" for key, count in asked.items() if count is not None)
    if runtime != "ray" and nodes > 1:
        raise ConfigError(
            f"trainer.runtime={runtime} is on one machine, but trainer.nnodes={nodes}; use trainer.runtime=ray, or one"
        )
    if runtime == "inline":
        if (configured or 1) + taken > 1:
            raise ConfigError(
                f"trainer.runtime=inline is one process, but {text}; use trainer.runtime=processes, or one device"
            )
        return 1
    if machine.kind == "cpu":
        return configured or 1
    if machine.devices is None:
        if configured is None:
            raise ConfigError(f"{ACTOR_DEVICES} is not set, and this machine has no devices to count; set it")
        return configured
    available = max(machine.devices, 1)
    if (configured or 1) + taken > available and runtime != "ray":  # Ray counts its nodes' devices itself
        shares = [key for role, (key, _) in beside.items() if role != "rollout"]
        shares += ["actor_rollout_ref.hybrid_engine=False"] if "rollout" in beside else []
        raise ConfigError(
            f"{text}, but {available} {machine.kind} devices are visible; "
            f"lower {'their sum' if others else 'it'} to at most {available}"
            + (f", or leave out {' or '.join(shares)} to share the actor's" if others else "")
            + _nearest_split(beside, available)
        )
    return configured or max(available - taken - (0 if runtime == "ray" else far), 1)


def _nearest_split(beside: dict[str, tuple[str, int]], available: int) -> str:
    """Numbers that fit where the rollout is apart: half for it, the rest without the other roles' for the actor."""
    rollout = available // 2
    actor = available - rollout - sum(count for role, (_, count) in beside.items() if role != "rollout")
    if "rollout" not in beside or min(rollout, actor) < 1:
        return ""
    return f"; the nearest that fits is {ACTOR_DEVICES}={actor} {ROLLOUT}.{DEVICES}={rollout}"


def _first_fit(pool: Pool, placed: list[Pool], machine: Machine) -> Pool:
    """`pool` on the first machines that have room beside those `placed`, on new ones otherwise."""
    used = [0] * max(p.first_node + p.nodes for p in placed)
    for other in placed:
        for node in range(other.first_node, other.first_node + other.nodes):
            used[node] = max(used[node], other.first_device + other.per_node)
    room = math.inf if machine.kind == "cpu" else max(*used, machine.devices or pool.per_node)
    if pool.per_node > room:
        raise ConfigError(
            f"pool {pool.name} asks for {pool.per_node} devices of each machine, and each has {machine.devices}; "
            f"lower {REWARD_MODEL if pool.name == 'reward_model' else ROLLOUT}.{DEVICES} to at most {machine.devices}"
        )
    for first in range(len(used) + 1):
        device = max(used[first : first + pool.nodes], default=0)
        if device + pool.per_node <= room:
            return replace(pool, first_device=device, first_node=first)
    raise AssertionError("a new machine has room")


def _rollout_replicas(config: RunConfig, pool: Pool, machine: Machine, runtime: str, notes: list[str]) -> Replicas:
    arr, rollout, split = config.actor_rollout_ref, config.actor_rollout_ref.rollout, splits_rollout(config)
    if not split and rollout.n_gpus_per_node not in (None, config.trainer.n_gpus_per_node):
        notes.append(
            f"{ROLLOUT}.{DEVICES}={rollout.n_gpus_per_node} has no effect: the rollout is on the actor's devices; set "
            f"actor_rollout_ref.hybrid_engine=False or {ROLLOUT}.nnodes to give it devices of its own"
        )
    registered = rollout_engine_of(arr)
    if registered.weights is Weights.IN_PLACE:
        if split:
            raise ConfigError(
                f"{ROLLOUT}.name={rollout.name} samples in the trainer's own ranks, so it can have no devices of its "
                f"own; use {ROLLOUT}.name=vllm, or drop actor_rollout_ref.hybrid_engine=False and {ROLLOUT}.nnodes"
            )
        for name in ("tensor_model_parallel_size", "data_parallel_size", "num_replicas"):
            if rollout[name] not in (None, 1):
                notes.append(
                    f"{ROLLOUT}.{name}={rollout[name]} has no effect: rollout.name={rollout.name} samples on every rank"
                )
        return Replicas("rollout", pool.name, pool.num_devices)
    tensor, data = rollout.tensor_model_parallel_size, rollout.data_parallel_size
    if registered.is_apart and tensor * data > 1:
        raise ConfigError(
            f"{ROLLOUT}.tensor_model_parallel_size={tensor} x data_parallel_size={data} with rollout.name="
            f"{rollout.name}, a replica of which has one device; set both to 1, or use {ROLLOUT}.name=vllm"
        )
    joins_server = registered.traits.joins_server and rollout.server.url is not None
    if joins_server or registered.weights is Weights.REMOTE or (machine.kind == "cpu" and not split):
        return Replicas("rollout", pool.name, replicas_without_devices(rollout, notes), tensor, on_devices=False)
    made = _fitted(Replicas("rollout", pool.name, 0, tensor, data), pool, rollout.num_replicas, ROLLOUT)
    on_ranks = runtime != "ray" or registered.traits.starts_on_nodes  # Ray's ranks may have other devices
    if on_ranks and not split and machine.kind != "cpu":
        _check_ranks_of_the_transport(made, pool, rollout.checkpoint_engine.backend)
    several = made.count > 1 and rollout.num_replicas is None and data == 1 and not split
    if runtime == "ray" and several and not registered.traits.starts_on_nodes:
        notes.append(
            f"{made.count} replicas of rollout.name={rollout.name} are planned, and beside ranks on Ray a run of this "
            f"version starts one, on the driver's machine; {ROLLOUT}.num_replicas=1 plans that one"
        )
    return made


def _reward_replicas(config: RunConfig, pool: Pool, machine: Machine) -> Replicas:
    """The servers of the reward model; on CPUs nobody counts their devices."""
    served = config.reward.reward_model.rollout
    tensor, data, number = served.tensor_model_parallel_size, served.data_parallel_size, served.num_replicas
    if machine.kind == "cpu":
        return Replicas("reward_model", pool.name, number or 1, on_devices=False)
    if (served.name or "native") == "native":
        return Replicas("reward_model", pool.name, 1)
    made = _fitted(Replicas("reward_model", pool.name, 0, tensor, data), pool, number, f"{REWARD_MODEL}.rollout")
    if (each := pool.per_node // made.size) == 0:
        raise ConfigError(
            f"{REWARD_MODEL}.rollout: a server takes tensor_model_parallel_size={tensor} x data_parallel_size={data} = "
            f"{made.size} devices of one machine, and pool {pool.name} has {pool.per_node} of each; lower them"
        )
    if reward_model_place(config.reward) == "judge" and made.count > each:
        raise ConfigError(
            f"a judge is one server on one machine, and its {made.count} replicas of {made.size} devices take "
            f"{-(-made.count // each)} machines of {pool.per_node}; the nearest that fits is "
            f"{REWARD_MODEL}.rollout.num_replicas={each}"
        )
    return made


def _check_ranks_of_the_transport(replicas: Replicas, pool: Pool, backend: str) -> None:
    """ConfigError where a transport by the platform's collectives would join two ranks on one device."""
    if backend not in ("nccl", "hccl"):
        return
    half = pool.per_node // 2
    apart = f"actor_rollout_ref.hybrid_engine=False {ACTOR_DEVICES}={pool.per_node - half} {ROLLOUT}.{DEVICES}={half}"
    raise ConfigError(
        f"{ROLLOUT}.checkpoint_engine.backend={backend} joins rank 0 of the trainer and the "
        f"{replicas.count * replicas.size} workers of the rollout, and {backend.upper()} joins one rank a device; "
        f"device 0 would have two, as the rollout is on the trainer's {pool.num_devices}. Set "
        f"{ROLLOUT}.checkpoint_engine.backend=naive (device memory) or gloo (host memory)"
        + (f", or give the rollout devices of its own: {apart}" if half and half % replicas.size == 0 else "")
    )


def replicas_without_devices(rollout: RolloutConfig, notes: list[str]) -> int:
    """Replicas where no devices are counted: `num_replicas`, else `data_parallel_size`, of which a note is kept."""
    count, number = rollout.data_parallel_size, rollout.num_replicas
    if number is not None and count > 1:
        raise ConfigError(
            f"{ROLLOUT}.data_parallel_size={count} is inside one replica and needs devices that are counted, of which "
            f"there are none here; leave it at 1, num_replicas={number} alone says how many replicas start"
        )
    if count > 1:
        notes.append(
            f"{ROLLOUT}.data_parallel_size={count} means {count} replicas here, where no devices are counted; write "
            f"{ROLLOUT}.num_replicas={count}: elsewhere data_parallel_size is inside one replica"
        )
    return number or count


def _fitted(asked: Replicas, pool: Pool, number: int | None, where: str) -> Replicas:
    """`asked` with its count: `number`, or as many as fill the pool; ConfigError where they do not fit."""
    size, per_node, total = asked.size, pool.per_node, pool.num_devices
    whole_nodes = size % per_node == 0 and per_node % asked.tensor == 0
    most = pool.nodes * (per_node // size) if size <= per_node else total // size * whole_nodes
    if (number is not None and number <= most) or (number is None and most * size == total):
        return replace(asked, count=number or most)
    text = (
        f"{where}: a replica takes tensor_model_parallel_size={asked.tensor} x data_parallel_size={asked.data} = "
        f"{size} devices, and pool {pool.name} has {pool.nodes} x {per_node}"
    )
    if number is not None and most:
        raise ConfigError(f"{text}, room for {most}; lower {where}.num_replicas={number} to that")
    data = asked.data if per_node % asked.data == 0 else 1
    near = [tensor for tensor in range(1, per_node + 1) if per_node % (tensor * data) == 0]
    tensor = min(near, key=lambda one: (abs(one - asked.tensor), one))
    change, number = f" and data_parallel_size={data}" if data != asked.data else "", total // (tensor * data)
    raise ConfigError(
        f"{text}, which replicas cannot divide evenly; the nearest that can is tensor_model_parallel_size={tensor}"
        f"{change}, for {number} replica{'s' * (number != 1)}"
    )
