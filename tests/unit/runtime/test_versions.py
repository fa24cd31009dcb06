"""Versions are compared between nodes: what is an error, what a warning, and what every rank then says."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from verl.plugin.platform import PlatformBase, PlatformCPU, PlatformCUDA
from verl.runtime import version_consistency as versions
from verl.runtime.version_consistency import check_ranks, check_same, own_versions
from verl.utils.errors import ConfigError, VerlError, WorkerError

OTHERS = {
    "torch": "2.99.0",
    "transformers": "9.9",
    "Python": "3.99",
    "verl": "0.11.0 (files 00000000)",
}
HARMLESS = {"numpy": "9.9.9", "Python's patch": "3.11.99", "tokenizers": "not installed"}


def on_two(**changed: str) -> dict[str, dict[str, str]]:
    return {"node a": own_versions(), "node b": own_versions() | changed}


def test_the_own_versions_are_those_of_the_environment():
    found = own_versions()
    assert found["torch"] == metadata.version("torch")
    has_vllm = any(metadata.distributions(name="vllm"))
    assert found["vllm"] == (metadata.version("vllm") if has_vllm else "not installed")
    assert found["Python"] == ".".join(map(str, sys.version_info[:2]))
    check_same({"node a": found, "node b": dict(found), "node c": dict(found)})


@pytest.mark.parametrize("package", OTHERS)
def test_what_computes_or_travels_between_ranks_must_be_the_same(package: str):
    with pytest.raises(ConfigError) as caught:
        check_same(on_two(**{package: OTHERS[package]}))
    assert str(caught.value) == (
        f"{package} is {own_versions()[package]} on node a, but {OTHERS[package]} on node b; install the same on every "
        "node"
    )


@pytest.mark.parametrize("name", ["vllm", "NCCL"])
def test_the_rest_and_an_engine_or_nccl_that_some_nodes_lack_are_warnings(caplog: pytest.LogCaptureFixture, name: str):
    with caplog.at_level(logging.WARNING):
        check_same(on_two(**HARMLESS))
    assert [record.getMessage().split(" is ")[0] for record in caplog.records] == list(
        name for name in own_versions() if name in HARMLESS
    )
    node = own_versions() | {name: "1.2"}
    caplog.clear()
    check_same({"node a": node, "node b": node | {name: "not installed"}})
    assert caplog.messages == [f"{name} is 1.2 on node a, but not installed on node b"]
    with pytest.raises(ConfigError, match=rf"{name} is 1\.2 on node a, but 1\.3 on node b; install"):
        check_same({"node a": node, "node b": node | {name: "1.3"}})


@pytest.mark.parametrize(("platform", "found"), [(PlatformCUDA(), "2.27.5"), (PlatformCPU(), "not installed")])
def test_nccl_is_the_one_that_torch_has_loaded_where_ranks_join_by_it(
    monkeypatch: pytest.MonkeyPatch, platform: PlatformBase, found: str
):
    monkeypatch.setattr(versions, "get_platform", lambda: platform)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    assert own_versions.__wrapped__()["NCCL"] == found


def test_many_nodes_that_differ_are_counted():
    nodes = {f"node {number}": own_versions() | {"torch": "2.99.0" if number else "2.98.0"} for number in range(65)}
    with pytest.raises(ConfigError, match=r"on node 0, but 2.99.0 on node 1, .* 2.99.0 on node 4 and 60 nodes more; "):
        check_same(nodes)


def test_a_change_of_a_source_file_is_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path):
    (tmp_path / "part.py").write_text("x = 1")
    monkeypatch.setattr(versions.verl, "__file__", str(tmp_path / "__init__.py"))
    found = []
    for text in ("x = 1", "x = 1", "x = 2"):
        (tmp_path / "part.py").write_text(text)
        found.append(own_versions.__wrapped__()["verl"])
    assert found[0] == found[1] != found[2]


def test_hidden_files_are_no_part_of_the_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "part.py").write_text("x = 1")
    monkeypatch.setattr(versions.verl, "__file__", str(tmp_path / "__init__.py"))
    before = own_versions.__wrapped__()
    (tmp_path / ".#part.py").symlink_to("somebody@somewhere.1234")  # an editor's lock, which leads nowhere
    (tmp_path / "gone.py").symlink_to("nowhere")
    (tmp_path / ".copies").mkdir()
    (tmp_path / ".copies" / "part.py").write_text("x = 0")
    assert own_versions.__wrapped__() == before


class Ranks:
    """Ranks of one process, each on a host of its own; `torch` by rank where it is another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, torch: dict[int, str]):
        self.torch, self.own, self.store, self.this = torch, own_versions(), dist.HashStore(), threading.local()
        monkeypatch.setattr(versions.socket, "gethostname", lambda: f"host{self.this.rank}")
        monkeypatch.setattr(versions, "own_versions", self.versions)

    def versions(self) -> dict[str, str]:
        return self.own | {"torch": self.torch.get(self.this.rank, self.own["torch"])}

    def say(self, rank: int, world_size: int = 3, limit_s: float = 60.0) -> str:
        self.this.rank = rank
        try:
            check_ranks(self.store, rank, world_size, timedelta(seconds=limit_s))
        except VerlError as error:
            return str(error)
        return "the same"


@pytest.mark.parametrize("torch", [{}, {2: "2.99.0"}])
def test_every_rank_of_a_rendezvous_says_what_differs(monkeypatch: pytest.MonkeyPatch, torch: dict[int, str]):
    said = f"torch is {own_versions()['torch']} on node host0, but 2.99.0 on node host2; install the same on every node"
    every = Ranks(monkeypatch, torch)
    with ThreadPoolExecutor(3) as threads:
        assert set(threads.map(every.say, range(3))) == {said if torch else "the same"}


def test_a_rank_that_does_not_say_its_versions_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions, "FAREWELL", timedelta(seconds=0.5))
    every = Ranks(monkeypatch, {})
    with ThreadPoolExecutor(2) as threads:
        [said] = set(threads.map(every.say, range(2), [4] * 2, [0.5] * 2))  # those of rank 2 and 3 are older
    assert said.startswith("rank 2 failed in init_process_group(): no versions were said within 0.5 s by rank 2, 3: ")
    assert said.endswith("; is an older version of this package there?")
    without_first = Ranks(monkeypatch, {}).say(1, limit_s=0.2)
    assert without_first.startswith(
        "rank 0 failed in init_process_group(): no versions were said within 0.4 s by rank 0: "
    )


def test_a_rank_0_that_ends_meanwhile_is_not_said_to_be_older():
    masters = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    store = dist.TCPStore("127.0.0.1", masters[0].port, is_master=False)
    threading.Timer(0.3, masters.clear).start()
    with pytest.raises(WorkerError, match=r"rank 0 failed .*\n?it has ended, and the store with it, before"):
        check_ranks(store, 1, 3)


SCRIPT = """
import socket
from verl.runtime import version_consistency as versions
from verl.runtime.rank import RankInfo
from verl.utils.errors import ConfigError
info = RankInfo.from_environment()
socket.gethostname = lambda: f"host{info.rank}"
if WRONG and info.rank:
    own = versions.own_versions()
    versions.own_versions = lambda: own | {"torch": "2.99.0"}
try:
    info.init_process_group()
    print("joined")
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize("wrong", [False, True])
def test_ranks_that_a_launcher_started_compare_before_they_join(wrong: bool):
    port = dist.TCPStore("127.0.0.1", 0, is_master=True).port  # free again at once
    settings = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", SCRIPT.replace("WRONG", str(wrong))]
    ranks = [
        subprocess.Popen(command, env={**os.environ, **settings, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = {rank.communicate(timeout=240)[0].strip() for rank in ranks}
    text = f"torch is {own_versions()['torch']} on node host0, but 2.99.0 on node host1; install the same on every node"
    assert said == {text if wrong else "joined"}
