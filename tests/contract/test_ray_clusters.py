"""Simulated clusters of 2 x 8 and 16 x 8 devices: where the ranks of a plan are, refusals, and a node that is lost."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.small_ray import joined_nodes
from verl.config import load_config
from verl.placement import pools as placement
from verl.placement.pools import plan_run, start_pools
from verl.plugin.platform.cuda import PlatformCUDA
from verl.runtime import ray_cluster
from verl.runtime.ray_cluster import Devices, release, reserve
from verl.runtime.ray_group import RayGroup
from verl.runtime.version_consistency import own_versions
from verl.utils.errors import ConfigError, VerlError, WorkerError

pytestmark = pytest.mark.ray
NODE = {"num_cpus": 8, "num_gpus": 8, "object_store_memory": 80 << 20}
WORDS = ["data.train_batch_size=48", "actor_rollout_ref.rollout.n=1", "trainer.runtime=ray", "trainer.nnodes=2"]


class LightGroup(RayGroup):
    """A group whose ranks do nothing but say where they are."""

    def __init__(self, factory: Callable[[], Any], *settings: Any):
        from tests.light_ranks import LightRank

        self.actor_class = LightRank
        super().__init__(dict, *settings)

    def said(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.broadcast("say")]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Two nodes of eight devices at addresses of their own, joined by this program."""
    with joined_nodes(NODE, {**NODE, "node_ip_address": "127.0.0.2"}) as cluster:
        yield cluster


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs whose devices are GPUs and whose ranks are light."""
    monkeypatch.setattr(placement, "get_platform", PlatformCUDA)
    monkeypatch.setattr(placement, "check_devices_asked_for", lambda *of_this_machine: None)
    monkeypatch.setattr(placement, "RayGroup", LightGroup)
    monkeypatch.setenv("VERL_TEST_VERSIONS", json.dumps(own_versions()))


def start(*words: str) -> Any:
    config = load_config([*WORDS, *words])
    return start_pools(config, 1, plan_run(config), lambda line: None)


def free_devices(expected: float) -> bool:
    """Whether so many devices are free within 20 s."""
    ray: Any = pytest.importorskip("ray")
    deadline = time.monotonic() + 20
    while (found := ray.available_resources().get("GPU", 0.0)) != expected and time.monotonic() < deadline:
        time.sleep(0.1)
    return bool(found == expected)


def test_the_ranks_of_a_plan_start_on_its_nodes_each_with_a_device_of_its_own(nodes: Any, light: None):
    from ray.util.placement_group import placement_group_table

    ray: Any = pytest.importorskip("ray")
    pools = start("trainer.experiment_name=first", "trainer.n_gpus_per_node=6", "critic.n_gpus_per_node=2")
    try:
        actor, critic = (group.said() for group in pools.groups.values())
        for ranks, per_node in ((actor, 6), (critic, 2)):
            assert [int(rank["RANK"]) for rank in ranks] == list(range(2 * per_node))
            assert [len({rank["node"] for rank in part}) for part in (ranks[:per_node], ranks[per_node:])] == [1, 1]
            assert {rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {str(per_node)}
            first = next(node for node in ray.nodes() if node["NodeID"] == ranks[0]["node"])
            assert {rank["MASTER_ADDR"] for rank in ranks} == {first["NodeManagerAddress"]}  # on both nodes
        places = [(rank["node"], *rank["devices"]) for rank in (*actor, *critic)]
        assert len(set(places)) == len({node for node, _ in places}) * 8 == 16
        assert all(rank["LOCAL_RANK"] == rank["devices"][0] for rank in (*actor, *critic))
        assert not any(rank["heavy"] for rank in actor)
        names = [group["name"] for group in placement_group_table().values() if group["state"] == "CREATED"]
        assert len(names) == 1 and names[0].startswith("verl-first-")
    finally:
        pools.close()
    assert free_devices(16)


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        start(*words)
    return str(caught.value)


def test_a_plan_that_no_node_holds_is_refused_with_the_nearest_that_fits(nodes: Any, light: None):
    text = refused("trainer.n_gpus_per_node=12")
    assert text.startswith(
        "the run of 24 ranks needs 2 nodes with 12 CPU, 12 GPU each, but 0 of the cluster's 2 can hold that (8 CPU, "
        "8 GPU and 8 CPU, 8 GPU); the nearest that fits is trainer.nnodes=2 trainer.n_gpus_per_node=8; lower"
    )
    assert "the nearest that fits is trainer.nnodes=2 trainer.n_gpus_per_node=8;" in refused(
        "trainer.nnodes=3", "trainer.n_gpus_per_node=8"
    )
    text = refused("trainer.n_gpus_per_node=8", "critic.n_gpus_per_node=2")
    assert "the run of 20 ranks (actor 16, critic 4) needs 2 nodes with 10 CPU, 10 GPU each, but 0 of" in text
    assert "the nearest that fits is trainer.nnodes=2 trainer.n_gpus_per_node=6;" in text
    assert "the nearest" not in refused("trainer.n_gpus_per_node=1", "critic.n_gpus_per_node=8")
    assert free_devices(16)


def test_two_runs_may_share_the_devices(nodes: Any, light: None):
    half = ["trainer.n_gpus_per_node=1", "ray_kwargs.devices_per_rank=0.5"]
    runs = [start(*half, "critic.n_gpus_per_node=1")]
    try:
        runs.append(start(*half))
        ranks = [rank for pools in runs for group in pools.groups.values() for rank in group.said()]
        assert len(ranks) == 6 and len({rank["node"] for rank in ranks}) == 2
        assert free_devices(13)  # of each node, a device for the pools of the first, and half of one for the second
    finally:
        for pools in runs:
            pools.close()
    assert free_devices(16)


def test_a_node_with_another_version_is_refused_by_name(nodes: Any, light: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_TEST_VERSIONS", json.dumps(own_versions() | {"transformers": "9.9"}))
    text = refused("trainer.n_gpus_per_node=1")
    assert re.match(
        rf"transformers is {re.escape(own_versions()['transformers'])} on the driver's node, but 9\.9 on node \S+ "
        r"\(ranks from 0\), 9\.9 on node \S+ \(ranks from 1\); install the same on every node$",
        text,
    )
    monkeypatch.delenv("VERL_TEST_VERSIONS")  # a rank that cannot say its versions, as one of an older package
    with pytest.raises(VerlError, match=r"(?s)Ray could not start the ranks: .*\nhas a node an older version of this"):
        start("trainer.n_gpus_per_node=1")
    assert free_devices(16)


def test_a_lost_node_ends_the_group_which_names_a_rank_of_it(nodes: Any, light: None):
    ray: Any = pytest.importorskip("ray")
    pools = start("trainer.n_gpus_per_node=1")
    try:
        [group] = pools.groups.values()
        by_node = {rank["node"]: int(rank["RANK"]) for rank in group.said()}
        waiting = threading.Thread(target=nodes.remove_node, args=(*nodes.worker_nodes, False))
        lost = next(node["NodeID"] for node in ray.nodes() if node["NodeManagerAddress"] == "127.0.0.2")
        calls = [group.post(rank, "wait", [()])[0] for rank in (0, 1)]
        waiting.start()
        culprit = rf"rank {by_node[lost]} failed in wait\(\):\s*its actor on node 127\.0\.0\.2 has ended: "
        for call in calls:  # also that of the rank that lives
            with pytest.raises(WorkerError, match=culprit):
                call.result(timeout=120)
        waiting.join()
        with pytest.raises(WorkerError, match=culprit):
            group.said()
    finally:
        pools.close()
    assert free_devices(8)
    assert "needs 2 nodes with 1 CPU, 1 GPU each, but 1 of the cluster's 1 can hold" in refused(
        "trainer.n_gpus_per_node=1"
    )


def test_sixteen_nodes_of_eight_are_reserved_at_once_or_refused(nodes: Any, monkeypatch: pytest.MonkeyPatch):
    from ray.util.placement_group import placement_group_table

    while len(nodes.worker_nodes) < 15:
        nodes.add_node(**NODE)  # one after the other: a node ends where its helpers do not start in 30 s
    devices = Devices(PlatformCUDA(), 16, group_name="verl-large")
    group = reserve(devices, 128, "the run")
    try:
        assert len(set(placement_group_table(group)["bundles_to_node_id"].values())) == 16
        monkeypatch.setattr(ray_cluster, "RESERVE_S", 1.0)
        taken = "needs 1 node with 1 CPU, 1 GPU each, but after 1 s only 0 CPU, 0 GPU of the cluster are free"
        with pytest.raises(ConfigError, match=taken):
            reserve(Devices(PlatformCUDA()), 1, "another")
    finally:
        release(group)
    for num_nodes, per_node, fit in ((16, 9, 0), (17, 8, 16)):
        with pytest.raises(ConfigError) as caught:
            reserve(Devices(PlatformCUDA(), num_nodes), num_nodes * per_node, "the run")
        assert f"but {fit} of the cluster's 16 can hold that" in str(caught.value)
        assert "; the nearest that fits is trainer.nnodes=16 trainer.n_gpus_per_node=8; " in str(caught.value)
    assert free_devices(128)
