"""A small Ray for tests: this machine alone, no dashboard, a short folder that is removed at the end."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import import_or_skip
from verl.plugin.platform import choose_platform
from verl.runtime.ray_cluster import Cluster, Devices, join_cluster

NUM_CPUS = 4
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # Ray reads it once: a call after the end must not start another Ray


@contextmanager
def no_address() -> Iterator[None]:
    """Without the RAY_ADDRESS of a cluster that is not for tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        yield


@contextmanager
def small_ray(**settings: Any) -> Iterator[Cluster]:
    """Start it for this process, with `settings` of ray.init; ends it, with every process it has started."""
    import_or_skip("ray")
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a socket's path has at most 107 characters
    usual = {"address": "local", "num_cpus": NUM_CPUS, "_temp_dir": folder, "object_store_memory": 200 << 20}
    with no_address():
        cluster = join_cluster({**usual, **settings})
        try:
            yield cluster
        finally:
            cluster.leave()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def simulated_nodes(head: dict[str, Any], *others: dict[str, Any]) -> Iterator[Any]:
    """A Ray of simulated nodes, each started with its settings, which this process has not joined."""
    import_or_skip("ray")
    from ray.cluster_utils import Cluster

    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("RAY_TMPDIR", folder)  # also of the file that names the newest cluster of a machine
        os.mkdir(f"{folder}/ray")
        cluster = Cluster(initialize_head=True, head_node_args={**head, "include_dashboard": False})
        try:
            for node in others:
                cluster.add_node(**node)
            yield cluster
        finally:
            cluster.shutdown()


@contextmanager
def joined_nodes(head: dict[str, Any], *others: dict[str, Any]) -> Iterator[Any]:
    """Such a Ray, joined by this process."""
    with no_address(), simulated_nodes(head, *others) as cluster:
        joined = join_cluster({"address": cluster.address})
        try:
            yield cluster
        finally:
            joined.leave()


def cpus() -> Devices:
    """Ranks of one core each on one machine."""
    return Devices(choose_platform("cpu"))
