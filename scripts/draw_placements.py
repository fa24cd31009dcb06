"""Draw docs/pictures/placement_*.svg: which role of a run sits on which devices, from one GPU to 64 machines.

Run as `python -m scripts.draw_placements` (`make docs` does). The placement is that of `verl plan` for the overrides of
PLACEMENTS, on machines of 8 GPUs; docs/scale/cluster.md shows each picture beside its command.
"""

from dataclasses import dataclass

from scripts.draw_architecture import PICTURES, box, picture, text
from verl.config import load_config
from verl.placement.plan import Machine, Plan, plan_placement
from verl.placement.tables import describe_cell
from verl.runtime.pools import Pool

DEVICES = 8  # of a machine
LEFT, RIGHT, GAP, ROLE_HEIGHT = 118, 966, 4, 30
WIDEST = 212  # of a device
SHOWN = 2  # first machines of a pool that are drawn; of the others only the last


@dataclass(frozen=True)
class Placement:
    """A picture: its file name, title, and the overrides of the run that it shows."""

    name: str
    title: str
    overrides: tuple[str, ...]
    devices: int = DEVICES


GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=True")
VLLM = "actor_rollout_ref.rollout.name=vllm"
TENSOR = "actor_rollout_ref.rollout.tensor_model_parallel_size"
BATCH = ("data.train_batch_size=1024", "actor_rollout_ref.actor.ppo_mini_batch_size=512")
PLACEMENTS = (
    Placement("one", "One GPU", ("trainer.n_gpus_per_node=1", *GRPO), devices=1),
    Placement("machine", "One machine", ("trainer.n_gpus_per_node=8", *GRPO, VLLM, f"{TENSOR}=2")),
    Placement(
        "split",
        "One machine, the rollout on GPUs of its own",
        (
            "trainer.n_gpus_per_node=6",
            *GRPO,
            "data.train_batch_size=96",
            "actor_rollout_ref.actor.ppo_mini_batch_size=48",
            VLLM,
            "actor_rollout_ref.hybrid_engine=False",
            "actor_rollout_ref.rollout.n_gpus_per_node=2",
        ),
    ),
    Placement(
        "two_machines",
        "Two machines, PPO with a critic on GPUs of its own",
        (
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=4",
            "critic.n_gpus_per_node=4",
            "algorithm.adv_estimator=gae",
            VLLM,
            f"{TENSOR}=4",
        ),
    ),
    Placement(
        "many_machines",
        "64 machines: 48 train, 16 sample",
        (
            "trainer.nnodes=48",
            "trainer.n_gpus_per_node=8",
            *GRPO,
            "data.train_batch_size=1536",
            "actor_rollout_ref.actor.ppo_mini_batch_size=768",
            VLLM,
            f"{TENSOR}=8",
            "actor_rollout_ref.rollout.nnodes=16",
            "actor_rollout_ref.rollout.n_gpus_per_node=8",
        ),
    ),
)


def plan_of(placement: Placement) -> Plan:
    """What `verl plan` decides for the overrides."""
    config = load_config(list(placement.overrides))
    runtime = "ray" if config.trainer.nnodes > 1 or config.actor_rollout_ref.rollout.nnodes else "processes"
    return plan_placement(config, Machine("GPU", placement.devices), runtime)


def draw(placement: Placement) -> str:
    """The picture of one placement: a row of devices for each machine, a bar for each role on its devices."""
    plan = plan_of(placement)
    total = sum(pool.num_devices for pool in plan.pools)
    parts = [text(24, 38, placement.title, "title"), text(RIGHT, 38, f"{total} GPU", "faint end")]
    y = 62.0
    for node in drawn_nodes(plan):
        if node is None:
            parts.append(text(LEFT, y + 14, "…", "name"))
            y += 30
            continue
        machine, height = draw_machine(plan, node, placement.devices, y)
        parts += machine
        y += height + 12
    parts.append(
        text(24, y + 10, "Bars one below the other share their devices, and work one after the other.", "faint")
    )
    return picture(y + 26, placement.title, parts)


def drawn_nodes(plan: Plan) -> list[int | None]:
    """Machines to draw; None: those between that look alike."""
    nodes: list[int | None] = []
    for first, end in sorted({(pool.first_node, pool.first_node + pool.nodes) for pool in plan.pools}):
        shown = list(range(first, min(end, first + SHOWN)))
        nodes += [node for node in shown if node not in nodes]
        if end - first > SHOWN:
            nodes += [None] * (end - first > SHOWN + 1) + [end - 1]
    return nodes


def draw_machine(plan: Plan, node: int, devices: int, y: float) -> tuple[list[str], float]:
    """The devices of machine `node` with the roles on them, and the height that they take."""
    each = min(WIDEST, (RIGHT - LEFT) / devices)
    pools = [pool for pool in plan.pools if 0 <= node - pool.first_node < pool.nodes]
    height = 34 + max(len(pool.roles) for pool in pools) * (ROLE_HEIGHT + GAP) + 4
    parts = [
        box(LEFT - GAP, y, devices * each + GAP, height, "floor"),
        text(24, y + 22, "machine", "faint"),
        text(24, y + 40, str(node), "name"),
    ]
    for device in range(devices):
        parts.append(text(LEFT + (device + 0.5) * each, y + 20, f"GPU {device}", "small faint mid"))
    for pool in pools:
        for row, role in enumerate(pool.roles):
            parts += draw_role(plan, pool, role, node, y + 30 + row * (ROLE_HEIGHT + GAP), each)
    return parts, height


def draw_role(plan: Plan, pool: Pool, role: str, node: int, y: float, each: float) -> list[str]:
    """The bar of a role across its devices, `each` so wide: one for all ranks, one for each replica."""
    replicas = next((found for found in plan.replicas if found.role == role and 1 < found.size <= pool.per_node), None)
    size, place = replicas.size if replicas else pool.per_node, node - pool.first_node
    parts = []
    for first in range(0, pool.per_node, size):
        if replicas:
            words = f"replica {(place * pool.per_node + first) // size}"
        else:
            words = describe_cell(plan, pool, role, place)
        x, width = LEFT + (pool.first_device + first) * each, size * each - GAP
        label = f"{role}: {words}" if first == 0 else words
        parts += [
            box(x, y, width, ROLE_HEIGHT, "room", 4),
            box(x, y, 5, ROLE_HEIGHT, "write" if role == "rollout" else "bar", 2),
            text(x + width / 2, y + 20, label, "small mid"),
        ]
    return parts


def main() -> None:
    for placement in PLACEMENTS:
        (PICTURES / f"placement_{placement.name}.svg").write_text(draw(placement), encoding="utf-8")


if __name__ == "__main__":
    main()
