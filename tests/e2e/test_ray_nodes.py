"""A main job of two ranks on each of two Ray nodes is the job on four processes of this machine."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import import_or_skip
from tests.e2e import jobs
from tests.e2e.test_ranks import COMMON, STEPS, trained
from verl.observe.ledger import read_ledger

pytestmark = pytest.mark.ray
HYBRID = [f"{jobs.ARR}.actor.fsdp_config.fsdp_size=2"]  # a copy of the parameters on each node, sharded by its ranks


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A Ray of two simulated nodes of two cores, which have addresses of their own. RAY_ADDRESS names it."""
    import_or_skip("ray")
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        small = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**small, "temp_dir": folder})
        try:
            cluster.add_node(num_cpus=2, object_store_memory=100 << 20, node_ip_address="127.0.0.2")
            monkeypatch.setenv("RAY_ADDRESS", cluster.address)
            yield cluster.address
        finally:
            cluster.shutdown()


def test_a_job_on_two_nodes_of_ray_is_the_job_on_one_machine(
    tmp_path: Path, two_nodes: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs.prepare(tmp_path, layers=2)
    timeline = tmp_path / "ray.json"
    on_ray = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"ray_kwargs.timeline_json_file={timeline}"]
    jobs.train(tmp_path, "ray", *COMMON, *HYBRID, *on_ray)  # auto: RAY_ADDRESS is set
    said = capfd.readouterr().out
    assert f"Ray: joined {two_nodes} (RAY_ADDRESS); 2 nodes, 4 CPU, asked for 4" in said
    assert timeline.stat().st_size > 2
    jobs.train(tmp_path, "processes", *COMMON, *HYBRID, "trainer.runtime=processes", "trainer.n_gpus_per_node=4")
    weights, expected = (trained(tmp_path, run) for run in ("ray", "processes"))
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-10)
    found, wanted = (jobs.without_timings(jobs.metrics(tmp_path, run)) for run in ("ray", "processes"))
    assert found.keys() == wanted.keys() and len(wanted) >= STEPS
    for step, values in wanted.items():
        assert found[step] == pytest.approx(values, rel=1e-10, abs=1e-10), step
    for step in range(1, STEPS + 1):
        one, two = (read_ledger(tmp_path / run / "ledger", step).batch for run in ("ray", "processes"))
        assert torch.equal(one["tokens"], two["tokens"])
