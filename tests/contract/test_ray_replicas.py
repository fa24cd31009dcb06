"""Rollout replicas on the machines of a Ray cluster: two simulated nodes of two devices, light ranks, light engines."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import rollout_server
from tests.contract.test_ray_clusters import LightGroup
from tests.contract.test_replicas import answers
from tests.contract.test_transports import Publishing, settings
from tests.contract.test_weight_sync import small_model
from tests.e2e.test_ray_nodes import lose
from tests.rollout_adapters import letters_tokenizer
from tests.small_ray import joined_nodes
from verl.config import load_config
from verl.placement import pools as placement
from verl.placement.pools import plan_run, start_pools
from verl.plugin.platform.cuda import PlatformCUDA
from verl.runtime.version_consistency import own_versions
from verl.trainer.ppo import rollout_setup
from verl.workers.rollout.router import Router

pytestmark = pytest.mark.ray
NODE = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 80 << 20}
ROLLOUT = "actor_rollout_ref.rollout"
SECOND = "127.0.0.2"


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Joined by this program, in which devices are GPUs and ranks are light."""
    monkeypatch.setenv("VERL_TEST_VERSIONS", json.dumps(own_versions()))
    for module in (placement, rollout_setup):
        monkeypatch.setattr(module, "get_platform", PlatformCUDA)
    monkeypatch.setattr(placement, "check_devices_asked_for", lambda *of_this_machine: None)
    monkeypatch.setattr(placement, "RayGroup", LightGroup)
    with joined_nodes(NODE, {**NODE, "node_ip_address": SECOND}) as cluster:
        yield cluster


class Run:
    """Ranks and replicas; each replica has noted its process and what it sees."""

    def __init__(self, folder: Path, *words: str, engine: str = "vllm"):
        small_model().save_pretrained(folder)
        self.seen = folder / "seen"
        module = {"vllm": "tests.rollout_server", "sglang": "tests.sglang_server"}[engine]
        python = rollout_server.python_wrapper(
            folder, module, f'echo "$$ $CUDA_VISIBLE_DEVICES $NCCL_CUMEM_ENABLE" >> {self.seen}; shift 2'
        )
        config = load_config([
            "trainer.runtime=ray", "trainer.nnodes=2", "data.train_batch_size=8", f"{ROLLOUT}.n=1",
            f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.dtype=float32", f"{ROLLOUT}.server.python={python}",
            f"actor_rollout_ref.model.path={folder}", *words,
        ])  # fmt: skip
        self.pools = start_pools(config, 1, plan_run(config), lambda line: None)
        try:
            [group] = self.pools.groups.values()
            self.ranks = group.said()
            self.engine: Router = rollout_setup.build_rollout_engine(
                config, plan_run(config), SimpleNamespace(group=group), letters_tokenizer()
            )
        except BaseException:
            self.pools.close()
            raise

    def processes(self) -> list[str]:
        """By start, process, devices and a variable of the platform."""
        return self.seen.read_text().splitlines()

    def close(self) -> None:
        self.engine.close()
        self.pools.close()


def is_alive(process: int) -> bool:
    return Path(f"/proc/{process}/cmdline").exists() and Path(f"/proc/{process}/cmdline").read_bytes() != b""


def until(condition: Any) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("engine", "size", "how"),
    [
        ("vllm", "data_parallel_size", "ended with signal SIGKILL"),
        ("sglang", "tensor_model_parallel_size", "the SGLang server: it ended with signal SIGKILL"),
    ],
)
def test_replicas_share_the_devices_of_their_nodes_and_are_replaced_there(
    engine: str, size: str, how: str, tmp_path: Path, nodes: Any, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    run = Run(tmp_path, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.{size}=2", engine=engine)
    try:
        names = [engine.server.name for engine in run.engine.replicas]
        assert sorted(names) == ["its process on node 127.0.0.1", f"its process on node {SECOND}"]
        ranks = [",".join(rank["devices"][0] for rank in run.ranks[i : i + 2]) for i in (0, 2)]
        started = [line.split(maxsplit=1) for line in run.processes()]
        assert sorted(seen for _, seen in started) == sorted(f"{devices} 0" for devices in ranks)
        publishing = Publishing(run.engine, settings("naive", tmp_path))
        assert publishing.publish(0).num_replicas == 2 and answers(run.engine) == {0: 4, 1: 4}

        os.kill(int(started[1][0]), signal.SIGKILL)
        until(lambda: any(engine.lost for engine in run.engine.engines))
        assert sum(answers(run.engine).values()) == 8 and how in caplog.text
        [number] = run.engine.starting
        until(lambda: run.engine.starting[number].has_started)
        assert publishing.publish(1).num_replicas == 2 and answers(run.engine) == {0: 4, 1: 4}
        assert [engine.server.name for engine in run.engine.replicas] == names
        again = run.processes()[2].split(maxsplit=1)
        assert again[1] == started[1][1]
        publishing.close()
    finally:
        run.close()
    until(lambda: not any(is_alive(int(line.split()[0])) for line in run.processes()))


def test_replicas_apart_have_devices_of_their_own_and_a_lost_node_takes_its_replicas_with_it(
    tmp_path: Path, nodes: Any, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING)
    run = Run(
        tmp_path, "trainer.n_gpus_per_node=1", "actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.n_gpus_per_node=1"
    )
    try:
        by_node = {rank["node"]: rank["devices"][0] for rank in run.ranks}
        assert len(by_node) == 2
        assert sorted(line.split()[1] for line in run.processes()) == sorted(
            {"0": "1", "1": "0"}[device] for device in by_node.values()
        )
        assert answers(run.engine) == {0: 4, 1: 4}
        names = [engine.server.name for engine in run.engine.engines]
        lost = next(number for number, name in enumerate(names) if name.endswith(SECOND))
        lose(nodes, next(iter(nodes.worker_nodes)))
        until(lambda: run.engine.engines[lost].lost)
        assert answers(run.engine) == {1 - lost: 8}
        assert [*run.engine.starting] == [lost]
    finally:
        run.close()
    until(lambda: not any(is_alive(int(line.split()[0])) for line in run.processes()))
