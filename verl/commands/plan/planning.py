"""The plan of a configuration on devices that this machine need not have, and whether it fits them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from verl.commands.plan.run_config import load_run_config
from verl.config import RunConfig
from verl.models.parameter_counts import ParameterCounts
from verl.placement.devices import chosen_runtime
from verl.placement.memory import PoolMemory, count_roles, estimate_memory
from verl.placement.plan import Machine, Plan, plan_placement
from verl.placement.tables import plan_text
from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_manager import check_device_name
from verl.trainer.ppo.facts import RunFacts
from verl.utils.errors import ConfigError

ROOM = (  # overrides that make room, the cheapest first
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "critic.fsdp.optimizer_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
    "critic.fsdp.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    "critic.fsdp.offload_policy=True",
    "actor_rollout_ref.actor.fsdp_config.offload_policy=True",
)


def print_plan(words: Sequence[str], config: RunConfig, device_memory: float | None, as_json: bool) -> None:
    """Print the plan of `config`, which `words` give, on devices of so many GB (None: this machine's)."""
    machine = planned_machine(config, device_memory is not None)
    plan = plan_placement(config, machine, chosen_runtime(config.trainer))
    counts: dict[str, ParameterCounts] = {}
    memory: list[PoolMemory] = []
    unknown = ""
    device_bytes = _device_bytes(device_memory, machine)
    try:
        counts = count_roles(config, plan)
    except ConfigError as error:
        unknown = f"not known: {error}"
    else:
        memory = estimate_memory(config, plan, counts, device_bytes)
    print(_json(config, plan, memory, unknown) if as_json else plan_text(plan, memory, unknown))
    if not as_json:
        print("\ndecided: " + ", ".join(f"{name}={value}" for name, value in _decided(config, plan).items()))
    if device_bytes is not None and memory:
        check_fits(words, counts, memory, device_bytes, plan.devices_per_rank)


def planned_machine(config: RunConfig, gives_memory: bool = False) -> Machine:
    """This machine's devices without `trainer.n_gpus_per_node`, otherwise as many as are asked for; `gives_memory`, or
    more than one device, asks for accelerators where this machine has none."""
    settings, here = config.trainer, get_platform()
    if settings.device != "auto":
        check_device_name(settings.device)
    kind = here.device_name if settings.device == "auto" else settings.device
    asked = gives_memory or (settings.n_gpus_per_node or 1) > 1 or settings.nnodes > 1
    if kind == "cpu" and settings.device == "auto" and asked:
        return Machine("GPU")
    is_here = kind == here.device_name and settings.n_gpus_per_node is None
    return Machine(kind, here.device_count() if is_here else None)


def _device_bytes(given: float | None, machine: Machine) -> int | None:
    """`given` GB, else what this machine's devices have, if such are planned; None where nobody knows."""
    if given is not None:
        if not given > 0:
            raise ConfigError(f"--device-memory {given} must be above 0: the GB of one device")
        return int(given * 1e9)
    platform = get_platform()
    if machine.kind != platform.device_name or machine.kind == "cpu" or not platform.is_available():
        return None
    return platform.total_memory()


def check_fits(
    words: Sequence[str],
    counts: Mapping[str, ParameterCounts],
    memory: Sequence[PoolMemory],
    device_bytes: int,
    share: float = 1.0,
) -> None:
    """ConfigError where a rank of a pool needs more memory than its `share` of a device has, with the overrides of
    `ROOM` that are enough."""
    full = [pool for pool in memory if pool.peak[0] > device_bytes * share]
    if not full:
        return
    size, phase = full[0].peak
    added = _room(words, counts, device_bytes, share)
    move = "offloading alone does not help: take more devices, adapters (lora_rank), or a smaller model"
    part = "" if share == 1 else f", of which ray_kwargs.devices_per_rank={share:g} is {share * device_bytes / 1e9:.1f}"
    raise ConfigError(
        f"pool {full[0].pool} needs {size / 1e9:.1f} GB of a device in phase {phase!r}, and a device has "
        f"{device_bytes / 1e9:.1f} GB{part}; " + (f"the nearest that fits adds {' '.join(added)}" if added else move)
    )


def _room(words: Sequence[str], counts: Mapping[str, ParameterCounts], device_bytes: int, share: float) -> list[str]:
    """Overrides of `ROOM` with which the plan fits, none of them in vain; empty where all are not enough."""

    def fits(added: list[str]) -> bool | None:
        """None where there is no such plan: the rollout's weights have no room in a smaller share."""
        config = load_run_config([*words, *added])
        plan = plan_placement(config, planned_machine(config, gives_memory=True), chosen_runtime(config.trainer))
        try:
            memory = estimate_memory(config, plan, counts, device_bytes)
        except ConfigError:
            return None
        return all(pool.peak[0] <= device_bytes * share for pool in memory)

    config, enough = load_run_config(words), list[str]()
    strategies = {"critic": config.critic.fsdp.strategy}
    strategies["actor_rollout_ref"] = config.actor_rollout_ref.actor.fsdp_config.strategy
    for override in ROOM:
        if "offload_policy" in override and strategies[override.partition(".")[0]] != "fsdp2":
            continue  # no other engine has it
        if (fitting := fits([*enough, override])) is not None:
            enough.append(override)
        if fitting:
            break
    else:
        return []
    for override in list(enough):
        if fits(rest := [other for other in enough if other != override]):
            enough = rest
    return enough


def _json(config: RunConfig, plan: Plan, memory: Sequence[PoolMemory], unknown: str) -> str:
    pools, decided = [{**asdict(pool), "sums": pool.sums} for pool in memory], _decided(config, plan)
    return json.dumps({**asdict(plan), "memory": pools, "memory_unknown": unknown, "decided": decided}, indent=2)


def _decided(config: RunConfig, plan: Plan) -> dict[str, object]:
    """The other `RunFacts`; why they are not known, where external_lib registers the algorithm."""
    try:
        return {name: value for name, value in vars(RunFacts.of(config, plan)).items() if name != "placement"}
    except ConfigError as error:
        return {"error": str(error)}
