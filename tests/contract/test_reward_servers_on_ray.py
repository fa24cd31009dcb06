"""Servers of a reward model, and a judge, on the machines of a Ray cluster: two simulated nodes, light ranks, stand-ins
that answer as the servers do."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.contract.test_ray_clusters import LightGroup
from tests.small_ray import joined_nodes
from verl.config import load_config
from verl.placement import pools as placement
from verl.placement.pools import plan_run, start_pools
from verl.plugin.platform.cuda import PlatformCUDA
from verl.rewards import reward_servers
from verl.rewards.base import RewardInput
from verl.rewards.scoring_pool import end_scoring_processes
from verl.runtime.version_consistency import own_versions
from verl.trainer.ppo import reward_model_setup
from verl.trainer.ppo.reward_model_setup import start_reward_model
from verl.utils.errors import ConfigError, RewardError

pytestmark = pytest.mark.ray
NODE = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 80 << 20}
ADDRESSES = ("127.0.0.3", "127.0.0.2")  # the driver is on the first
KEY = "reward.reward_model"
OWN = [f"{KEY}.enable_resource_pool=True", f"{KEY}.nnodes=1", f"{KEY}.n_gpus_per_node=2"]
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(f"{sys.argv[3]}.asked", "a") as file:
            file.write(f"{os.getpid()} {self.path}\\n")
        inputs = body.get("input", [])
        self.answer({"data": [{"index": i, "probs": [float(sum(ids))]} for i, ids in enumerate(inputs)]})

with open(f"{sys.argv[3]}.started", "a") as file:
    file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')} {os.getcwd()}\\n")
ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
FUNCTION = """
import json, urllib.request

def compute_score(data_source, solution_str, ground_truth, reward_router_address, extra_info=None, **more):
    import ray
    request = urllib.request.Request(f"http://{reward_router_address}/ask", json.dumps({"input": [[2, 3]]}).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        score = json.load(answer)["data"][0]["probs"][0]
    return {"score": score, "actor": ray.get_runtime_context().get_actor_id() or ""}
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """Joined by this program."""
    first, second = ({**NODE, "node_ip_address": address} for address in ADDRESSES)
    with joined_nodes(first, second) as cluster:
        yield cluster


@pytest.fixture
def folder(nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With the stand-in and a program to give as `server.python`. Devices are GPUs, and ranks are light."""
    monkeypatch.setenv("VERL_TEST_VERSIONS", json.dumps(own_versions()))
    for module in (placement, reward_model_setup, reward_servers):
        monkeypatch.setattr(module, "get_platform", PlatformCUDA)
    monkeypatch.setattr(placement, "check_devices_asked_for", lambda *of_this_machine: None)
    monkeypatch.setattr(placement, "RayGroup", LightGroup)
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "mine.py").write_text(FUNCTION)
    python = tmp_path / "python"  # python -m MODULE --host HOST --port PORT ...
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$4" "$6" {tmp_path}/server\n')
    python.chmod(0o700)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(folder: Path, what: str) -> list[list[str]]:
    """What the stand-ins have noted: `started` (process, devices, folder) or `asked` (process, path)."""
    file = folder / f"server.{what}"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def running(folder: Path, *words: str) -> Iterator[Any]:
    """The ranks of a run, its servers, and its reward."""
    config = load_config([
        "trainer.runtime=ray", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=1", f"{KEY}.enable=True",
        f"{KEY}.model_path=m", f"{KEY}.rollout.server.python={folder / 'python'}", f"{KEY}.rollout.name=vllm", *words,
    ])  # fmt: skip
    judge = {"reward_router_address": "127.0.0.1:1", "reward_model_tokenizer": None}
    is_judge = config.reward.custom_reward_function.path is not None
    prepared: Any = SimpleNamespace(
        model_reward=None if is_judge else SimpleNamespace(), reward=None, judge_port=1, judge_keywords=judge,
        tokenizer=None, facts=SimpleNamespace(placement=plan_run(config)),
    )  # fmt: skip
    with ExitStack() as started:
        pools = start_pools(config, 1, plan_run(config), lambda line: None)
        started.callback(pools.close)
        [group] = pools.groups.values()
        serving, reward = start_reward_model(config, prepared, pools, started)
        yield SimpleNamespace(ranks=group.said(), servers=serving if is_judge else serving.backend, reward=reward)


def until_gone(*processes: str) -> None:
    end = time.monotonic() + 60
    while any(Path(f"/proc/{process}/cmdline").exists() for process in processes):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_servers_with_devices_of_their_own_are_on_another_machine_and_end_with_the_run(folder: Path):
    with running(folder, "trainer.n_gpus_per_node=2", *OWN) as run:
        started = lines(folder, "started")
        assert sorted(devices for _, devices, _ in started) == ["0", "1"]
        assert {where for *_, where in started} == {str(folder)}  # paths are relative to the driver's folder
        [node] = {server.name.rpartition(" on node ")[2] for server in run.servers.servers}
        assert {server.address.partition(":")[0] for server in run.servers.servers} == {"127.0.0.1"}
        asked = [[number] * (1 + number % 7) for number in range(600)]
        assert asyncio.run(run.servers.scores(asked)) == [float(sum(ids)) for ids in asked]
        assert {process for process, _ in lines(folder, "asked")} == {process for process, *_ in started}
        asyncio.run(run.servers.wake())
        assert {path for _, path in lines(folder, "asked")} == {"/classify"}  # nothing sleeps

        os.kill(int(started[0][0]), signal.SIGKILL)
        said = rf"(?s)server \d of the reward model on node {node} gave no answer to /classify.*signal SIGKILL"
        with pytest.raises(RewardError, match=said):
            asyncio.run(run.servers.scores(asked))
    until_gone(*(process for process, *_ in started))


def test_servers_on_the_ranks_devices_see_these_and_sleep_but_when_they_score(folder: Path):
    with running(folder, "trainer.nnodes=2", "trainer.n_gpus_per_node=1") as run:
        ranks = sorted(rank["devices"][0] for rank in run.ranks)
        assert sorted(devices for _, devices, _ in lines(folder, "started")) == ranks
        assert len({server.name.rpartition(" on node ")[2] for server in run.servers.servers}) == 2

        async def one_pass() -> list[float]:
            await run.servers.wake()
            scores = await run.servers.scores([[1], [2, 3]])
            await run.servers.sleep()
            return scores

        assert asyncio.run(one_pass()) == [1.0, 5.0]
        for process, *_ in lines(folder, "started"):
            paths = [path for asked, path in lines(folder, "asked") if asked == process]
            assert paths == ["/sleep?level=1", "/wake_up", "/classify", "/sleep?level=1"]


@pytest.mark.parametrize("manager", ["naive", "remote"])
def test_a_judge_is_reached_from_where_the_function_runs(folder: Path, manager: str, monkeypatch: pytest.MonkeyPatch):
    def stand_in(settings: Any, device: str, replicas: int, sleeps: bool, host: str, port: int) -> list[str]:
        assert device == "cuda" and replicas == 2 and not sleeps
        return [settings.rollout.server.python, "-m", "serve", "--host", host, "--port", str(port)]

    monkeypatch.setattr(reward_servers, "judge_command", stand_in)
    function = [f"reward.custom_reward_function.path={folder / 'mine.py'}", f"reward.reward_manager.name={manager}"]
    with running(folder, "trainer.n_gpus_per_node=2", *OWN, *function, "reward.num_workers=2") as run:
        [(_, devices, _)] = lines(folder, "started")
        assert sorted(devices.split(",")) == ["0", "1"]
        host = run.servers.servers[0].address.partition(":")[0]
        assert host in (ADDRESSES if manager == "remote" else ("127.0.0.1", ADDRESSES[1]))
        rows = [RewardInput("toy", "x", "7", {"index": number}) for number in range(3)]
        scores = asyncio.run(run.reward.score(rows))
        assert [score.value for score in scores] == [5.0] * 3
        assert all(bool(score.extra["actor"]) == (manager == "remote") for score in scores)
        end_scoring_processes()


def test_ranks_of_a_reward_model_have_a_pool_of_their_own_on_another_machine(folder: Path):
    config = load_config([
        "trainer.runtime=ray", "data.train_batch_size=8", "actor_rollout_ref.rollout.n=1", f"{KEY}.enable=True",
        f"{KEY}.model_path=m", "trainer.n_gpus_per_node=1", *OWN,
    ])  # fmt: skip
    pools = start_pools(config, 1, plan_run(config), lambda line: None)
    try:
        actor, reward = (pools.group_of(role).said() for role in ("actor", "reward_model"))
        assert [rank["RANK"] for rank in reward] == ["0", "1"] and sorted(rank["devices"][0] for rank in reward) == [
            "0",
            "1",
        ]
        assert len({rank["node"] for rank in reward}) == 1 and reward[0]["node"] != actor[0]["node"]
    finally:
        pools.close()


def test_a_pool_that_the_cluster_cannot_hold_is_refused_with_the_numbers(folder: Path):
    with pytest.raises(ConfigError) as caught, running(folder, "trainer.n_gpus_per_node=2", *OWN, f"{KEY}.nnodes=2"):
        pass
    assert str(caught.value).startswith(
        "the run of 2 ranks and 4 devices for the reward model needs 3 nodes with 2 CPU, 2 GPU each, but 2 of the "
        "cluster's 2 can hold that (4 CPU, 2 GPU and 4 CPU, 2 GPU); lower"
    )
    assert lines(folder, "started") == []
