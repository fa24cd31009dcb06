"""Wait until a Ray cluster is complete, then run one task on every node; exit code 1 says what is missing."""

import argparse
import os
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote
def who_am_i() -> tuple[str, str]:
    """(Ray's id of the node, name of the SLURM node) where this runs."""
    return ray.get_runtime_context().get_node_id(), os.environ.get("SLURMD_NODENAME", "?")


def wait_for_nodes(count: int, timeout_s: float) -> list[dict]:
    """The live nodes, once there are `count` of them."""
    end = time.monotonic() + timeout_s
    while True:
        alive = [node for node in ray.nodes() if node["Alive"]]
        if len(alive) >= count:
            return alive
        if time.monotonic() > end:
            addresses = ", ".join(node["NodeManagerAddress"] for node in alive)
            sys.exit(f"only {len(alive)} of {count} Ray nodes joined within {timeout_s:.0f} s: {addresses}")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=300)
    arguments = parser.parse_args()
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    alive = wait_for_nodes(arguments.nodes, arguments.timeout_s)
    for node in alive:
        found = node["Resources"].get("GPU", 0)
        if found < arguments.gpus_per_node:
            sys.exit(f"node {node['NodeManagerAddress']} has {found:.0f} GPUs, not {arguments.gpus_per_node}")
    bundle = {"CPU": 1, "GPU": arguments.gpus_per_node} if arguments.gpus_per_node else {"CPU": 1}
    group = placement_group([bundle] * arguments.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=arguments.timeout_s)
    tasks = [
        who_am_i.options(
            num_cpus=1,
            num_gpus=arguments.gpus_per_node,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(arguments.nodes)
    ]
    places = ray.get(tasks, timeout=arguments.timeout_s)
    if len({identity for identity, _ in places}) != arguments.nodes:
        sys.exit(f"{arguments.nodes} tasks ran on fewer nodes: {places}")
    names = " ".join(sorted(name for _, name in places))
    print(f"ray: {arguments.nodes} nodes, {arguments.gpus_per_node} GPUs each, a task ran on each: {names}", flush=True)


if __name__ == "__main__":
    main()
