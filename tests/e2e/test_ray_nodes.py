"""A main job on two Ray nodes of two ranks is the job on four processes of this machine; it outlives a lost node."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import python_with_vllm
from tests.e2e import jobs
from tests.e2e.test_ranks import COMMON, STEPS, trained
from tests.small_ray import simulated_nodes
from verl.commands.quickstart.addition_task import CHARACTERS
from verl.commands.quickstart.small_model import make_model
from verl.observe.ledger import read_ledger

pytestmark = pytest.mark.ray
VLLM_STEPS = int(os.environ.get("VERL_TEST_VLLM_STEPS", "2"))  # 5 in a soak
HYBRID = [f"{jobs.ARR}.actor.fsdp_config.fsdp_size=2"]  # a copy of the parameters on each node, sharded by its ranks


SMALL = {"object_store_memory": 100 << 20}  # bytes


@contextlib.contextmanager
def ray_of_nodes(head_cpus: int, *addresses: str) -> Iterator[Any]:
    """A Ray of simulated nodes with addresses of their own: the head, and others of two cores each."""
    others = [{**SMALL, "num_cpus": 2, "node_ip_address": address} for address in addresses]
    with simulated_nodes({**SMALL, "num_cpus": head_cpus}, *others) as cluster:
        yield cluster


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """RAY_ADDRESS names the cluster."""
    with ray_of_nodes(2, "127.0.0.2") as cluster:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster


def test_a_job_on_two_nodes_of_ray_is_the_job_on_one_machine(
    tmp_path: Path, two_nodes: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs.prepare(tmp_path, layers=2)
    timeline = tmp_path / "ray.json"
    on_ray = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"ray_kwargs.timeline_json_file={timeline}"]
    jobs.train(tmp_path, "ray", *COMMON, *HYBRID, *on_ray)  # auto: RAY_ADDRESS is set
    said = capfd.readouterr().out
    assert f"Ray: joined {two_nodes.address} (RAY_ADDRESS); 2 nodes, 4 CPU, asked for 4" in said
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


def let_reward_wait(folder: Path, since: Path, until: Path) -> None:
    """The reward of `jobs.prepare` then holds the run from the time that one file is there until another is."""
    waits = (
        f"    while Path({str(since)!r}).exists() and not Path({str(until)!r}).exists():\n        time.sleep(0.05)\n"
    )
    lines = (folder / "reward.py").read_text().splitlines(keepends=True)
    (folder / "reward.py").write_text("".join(["import time\nfrom pathlib import Path\n", lines[0], waits, *lines[1:]]))


@pytest.mark.vllm
def test_ranks_on_two_nodes_train_with_a_replica_of_vllm_on_each(
    tmp_path: Path, two_nodes: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """The driver and its ranks in this environment, which has Ray; the replicas in that of vLLM."""
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs.prepare(tmp_path)
    make_model(tmp_path / "model", CHARACTERS, 0, hidden=128, layers=2)  # vLLM wants heads of at least 32 on a CPU
    rollout, starts = f"{jobs.ARR}.rollout", tmp_path / "starts"
    python = tmp_path / "python"  # which notes what starts it
    python.write_text(f'#!/bin/sh\ntr "\\0" " " < /proc/$PPID/cmdline >> {starts}\nexec {python_with_vllm()} "$@"\n')
    python.chmod(0o700)
    fixed = [
        *HYBRID, f"{rollout}.name=vllm", f"{rollout}.enforce_eager=True", f"{rollout}.kv_cache_bytes=16777216",
        f"{rollout}.server.python={python}", f"{rollout}.checkpoint_engine.probe_every=1", "trainer.device=cpu",
        f"trainer.total_training_steps={VLLM_STEPS}",
    ]  # fmt: skip
    two = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", f"{rollout}.num_replicas=2"]
    jobs.train(tmp_path, "ray", *fixed, *two)
    assert starts.read_text().count("ray::") == 2
    jobs.train(tmp_path, "one", *fixed, "trainer.runtime=processes", "trainer.n_gpus_per_node=4")
    found, wanted = jobs.metrics(tmp_path, "ray"), jobs.metrics(tmp_path, "one")
    for step in range(1, VLLM_STEPS + 1):
        row, expected = found[step], wanted[step]
        for name in ("critic/score/mean", "actor/pg_loss", "actor/grad_norm"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), (step, name)
        assert row["weight_sync/bytes_moved"] == 2 * expected["weight_sync/bytes_moved"]  # to both
        assert row["weight_sync/tensors_read_back"] == row["weight_sync/tensors_sent"] > 0
        assert row["weight_sync/probe_difference"] <= row["weight_sync/probe_bound"]


def lose(cluster: Any, node: Any) -> None:
    """End the node and its processes, as a power cut does."""
    raylet = node.all_processes["raylet"][0].process.pid
    children = [
        pid for task in Path(f"/proc/{raylet}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    cluster.remove_node(node, allow_graceful=False)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def test_a_run_that_loses_a_node_waits_for_another_and_goes_on(
    tmp_path: Path, two_nodes: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    jobs.prepare(tmp_path)
    saved, gone, done = tmp_path / "lost" / "global_step_1" / "trainer.json", tmp_path / "gone", threading.Event()
    let_reward_wait(tmp_path, saved, gone)

    def lose_a_node() -> None:
        while not saved.exists() and not done.is_set():
            time.sleep(0.05)
        lose(two_nodes, next(iter(two_nodes.worker_nodes)))
        gone.touch()
        two_nodes.add_node(num_cpus=2, node_ip_address="127.0.0.2", **SMALL)
        done.wait()  # a node ends with the thread that has started it

    monkeypatch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)  # which wants the main thread
    thread = threading.Thread(target=lose_a_node, daemon=True)
    thread.start()
    on_ray = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "trainer.save_freq=1", "trainer.node_wait_s=120"]
    try:
        jobs.train(tmp_path, "lost", *COMMON, *on_ray)
    finally:
        done.set()
    said = capfd.readouterr().out
    assert gone.exists() and "restart 1 of 3: all ranks, from step " in said, said[-3000:]
    assert (tmp_path / "lost" / f"global_step_{STEPS}" / "trainer.json").exists()
    assert {*range(1, STEPS + 1)} <= jobs.metrics(tmp_path, "lost").keys()
