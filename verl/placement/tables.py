"""A plan as text: devices x roles and phases x memory for `verl plan`, one line a pool for the log of a run."""

from collections.abc import Sequence

from verl.placement.memory import PoolMemory, gigabytes
from verl.placement.plan import Plan, Replicas
from verl.runtime.pools import Pool

ESTIMATE = "estimates; activations, logits and what libraries take for themselves are not counted"


def log_lines(plan: Plan, memory: Sequence[PoolMemory] = ()) -> list[str]:
    """One line a pool; none where there is one rank."""
    if len(plan.pools) == 1 and plan.pools[0].num_devices == 1:
        return []
    peaks = {pool.pool: _peak_text(pool) for pool in memory if pool.holdings}
    return [f"placement    {describe_pool(plan, pool)}{peaks.get(pool.name, '')}" for pool in plan.pools]


def describe_pool(plan: Plan, pool: Pool) -> str:
    """`actor: 8 devices (cuda 0-7): actor, reference, rollout (4 replicas of 2)`."""
    nodes = f" of nodes {_range(pool.first_node, pool.nodes)}" if plan.num_nodes > 1 else ""
    where = f"{describe_devices(plan, pool)}{nodes}"
    replicas = {r.role: f" ({_number(r.count, 'replica')} of {r.size})" for r in plan.replicas if r.on_devices}
    replicas |= {r.role: f" ({_number(r.count, 'replica')})" for r in plan.replicas if not r.on_devices}
    roles = ", ".join(role + replicas.get(role, "") for role in pool.roles)
    of = "device" if plan.devices_per_rank == 1 else "rank"
    return f"{pool.name}: {_number(pool.num_devices, of)} ({where}): {roles}"


def describe_devices(plan: Plan, pool: Pool) -> str:
    """The pool's devices on each of its machines; where ranks have parts of devices, how many and how large."""
    if plan.devices_per_rank < 1:
        return f"{pool.per_node} x {plan.devices_per_rank:g} {plan.machine.kind}"
    return f"{plan.machine.kind} {_range(pool.first_device, pool.per_node)}"


def _peak_text(memory: PoolMemory) -> str:
    size, phase = memory.peak
    share = f", with {memory.rollout_share:.0%} of it for a rollout that is awake" if memory.rollout_share else ""
    kept = f"; published weights in host memory: {gigabytes(int(memory.kept_in_host))}" if memory.kept_in_host else ""
    return f"; about {gigabytes(int(size))} of a device ({phase}){share}{kept}"


def plan_text(plan: Plan, memory: Sequence[PoolMemory], unknown: str = "") -> str:
    """The tables of `verl plan`; `unknown` says why there is no estimate of the memory."""
    total = sum(pool.num_devices for pool in plan.pools)
    nodes = _number(plan.num_nodes, "machine")
    what = _number(total, "device") if plan.devices_per_rank == 1 else f"{_number(total, 'rank')} on parts of devices"
    parts = [f"{what} ({plan.machine.kind}) on {nodes}\n{devices_table(plan)}"]
    parts += [memory_table(plan, pool) for pool in memory if pool.holdings]
    if plan.devices_per_rank < 1:
        parts.append(
            f"ray_kwargs.devices_per_rank={plan.devices_per_rank:g}: Ray picks which ranks share a device, those of "
            "other runs too; what they hold there adds up"
        )
    parts += [f"memory: {unknown or ESTIMATE}", *(f"note: {note}" for note in plan.notes)]
    return "\n\n".join(parts)


def devices_table(plan: Plan) -> str:
    """A row for the devices of each pool on each machine, a column for each role."""
    roles = list(dict.fromkeys(role for pool in plan.pools for role in pool.roles))
    rows = [["node", "devices", *roles]]
    for node in range(plan.num_nodes):
        for pool in plan.pools:
            if 0 <= node - pool.first_node < pool.nodes:
                cells = [
                    describe_cell(plan, pool, role, node - pool.first_node) if role in pool.roles else ""
                    for role in roles
                ]
                rows.append([str(node), describe_devices(plan, pool), *cells])
    return columns(rows, numbers=False)


def describe_cell(plan: Plan, pool: Pool, role: str, node: int) -> str:
    """The part of `role` on the pool's machine number `node`."""
    replicas = next((r for r in plan.replicas if r.role == role), None)
    if replicas is None:
        return f"rank{'s' * (pool.per_node > 1)} {_range(node * pool.per_node, pool.per_node)}"
    return _replicas_cell(replicas, pool, node)


def _replicas_cell(replicas: Replicas, pool: Pool, node: int) -> str:
    if not replicas.on_devices:
        return f"{_number(replicas.count, 'replica')} in processes of their own" if node == 0 else ""
    if replicas.size > pool.per_node:
        number = node * pool.per_node // replicas.size
        return f"part of replica {number}" if number < replicas.count else ""
    each = pool.per_node // replicas.size
    here = min(each, replicas.count - node * each)
    size = f" of {replicas.size}" if replicas.size > 1 else ""
    return f"replica{'s' * (here > 1)} {_range(node * each, here)}{size}" if here > 0 else ""


def memory_table(plan: Plan, memory: PoolMemory) -> str:
    """GB on each device of a pool: a row for what each role holds, a column for each phase."""
    rows = [[f"GB on a device of {memory.pool}", *memory.phases]]
    rows += [
        [f"{h.role}: {h.what}", *(f"{size / 1e9:.2f}" if size else "-" for size in h.sizes)] for h in memory.holdings
    ]
    rows.append(["sum", *(f"{size / 1e9:.2f}" for size in memory.sums)])
    text = columns(rows, numbers=True)
    if memory.rollout_share:
        text += (
            f"\nAwake, the rollout fills {memory.rollout_share:.0%} of a device with weights and KV cache; "
            "--device-memory GB shows it."
        )
    if memory.in_host:
        size = f"{memory.in_host / 1e9:.2f} GB for each device"
        text += f"\nAsleep, the rollout keeps the weights of its adapters in host memory: {size}."
    if memory.kept_in_host:
        size = f"{memory.kept_in_host / 1e9:.2f} GB for each device"
        text += f"\nThe actor keeps the published weights, beside those that it trains, in host memory: {size}."
    return text


def columns(rows: list[list[str]], numbers: bool) -> str:
    """Rows under their heads in columns of equal width; `numbers`, all but the first column, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if numbers and number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _number(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"
