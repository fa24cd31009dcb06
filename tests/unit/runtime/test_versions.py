"""Versions are compared between nodes: what is an error, what a warning, and what every rank then says."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest
import torch.distributed as dist

from verl.runtime import versions
from verl.runtime.versions import check_ranks, check_same, own_versions
from verl.utils.errors import ConfigError

OTHERS = {
    "torch": "2.99.0",
    "transformers": "9.9",
    "Python": "3.99",
    "verl": "0.11.0 (files 00000000)",
    "NCCL": "9.9",
}
HARMLESS = {"numpy": "9.9.9", "Python's patch": "3.11.99", "tokenizers": "not installed"}


def on_two(**changed: str) -> dict[str, dict[str, str]]:
    return {"node a": own_versions(), "node b": own_versions() | changed}


def test_the_own_versions_are_those_of_the_environment():
    found = own_versions()
    assert found["torch"] == metadata.version("torch") and found["vllm"] in ("not installed", found["vllm"])
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


def test_the_rest_and_an_engine_that_some_nodes_lack_are_warnings(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        check_same(on_two(**HARMLESS))
    assert [record.getMessage().split(" is ")[0] for record in caplog.records] == list(
        name for name in own_versions() if name in HARMLESS
    )
    node = own_versions() | {"vllm": "1.2"}
    caplog.clear()
    check_same({"node a": node, "node b": node | {"vllm": "not installed"}})
    assert caplog.messages == ["vllm is 1.2 on node a, but not installed on node b"]
    with pytest.raises(ConfigError, match=r"vllm is 1\.2 on node a, but 1\.3 on node b; install"):
        check_same({"node a": node, "node b": node | {"vllm": "1.3"}})


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


def say_of(rank: int, store: dist.Store) -> str:
    try:
        check_ranks(store, rank, 3)
    except ConfigError as error:
        return str(error)
    return "the same"


def test_every_rank_of_a_rendezvous_says_what_differs(monkeypatch: pytest.MonkeyPatch):
    wrong = {"node": "host"}
    monkeypatch.setattr(versions.socket, "gethostname", lambda: wrong["node"])
    with ThreadPoolExecutor(3) as ranks:
        assert set(ranks.map(say_of, range(3), [dist.HashStore()] * 3)) == {"the same"}


SCRIPT = """
import socket
from verl.runtime import versions
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
