"""What a run asks of Ray by platform, the environment of its ranks, and which Ray it joins; without a Ray."""

import os
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.plugin.fake_devices import FakePlatform
from verl.plugin.platform import PlatformBase
from verl.plugin.platform.cpu import PlatformCPU
from verl.plugin.platform.cuda import PlatformCUDA
from verl.plugin.platform.npu import PlatformNPU
from verl.plugin.platform.rocm import PlatformROCm
from verl.runtime import ray_cluster, ray_rank
from verl.runtime.ray_cluster import Devices, join_cluster, rank_environment, reserve
from verl.utils.errors import ConfigError


@pytest.mark.parametrize(
    ("platform", "bundle", "options"),
    [
        (PlatformCPU(), {"CPU": 2.0}, {"num_cpus": 0.5}),
        (PlatformCUDA(), {"CPU": 4.0, "GPU": 2.0}, {"num_cpus": 1, "num_gpus": 0.5}),
        (PlatformROCm(), {"CPU": 4.0, "GPU": 2.0}, {"num_cpus": 1, "num_gpus": 0.5}),
        (PlatformNPU(), {"CPU": 4.0, "NPU": 2.0}, {"num_cpus": 1, "resources": {"NPU": 0.5}}),
        (FakePlatform(), {"CPU": 4.0, "CHIP": 2.0}, {"num_cpus": 1, "resources": {"CHIP": 0.5}}),
    ],
    ids=lambda value: getattr(value, "vendor_name", None),
)
def test_ranks_ask_for_the_resource_of_their_platform(platform: PlatformBase, bundle: Any, options: Any):
    devices = Devices(platform, share=0.5)
    assert devices.of_ranks(4) == bundle and devices.actor_options() == options


@pytest.mark.parametrize(
    ("share", "ranks", "devices"), [(0.3, 3, 0.9), (0.3, 4, 2.0), (0.4, 3, 2.0), (0.6, 3, 3.0), (0.1, 10, 1.0)]
)
def test_a_rank_has_its_share_on_one_device(share: float, ranks: int, devices: float):
    found = Devices(PlatformCUDA(), share=share)
    assert found.of_ranks(ranks) == {"CPU": float(ranks), "GPU": pytest.approx(devices)}
    assert found.ranks_within({"CPU": 64.0, "GPU": 2.0}) == 2 * found.ranks_per_device


def test_two_ranks_of_a_group_on_one_device_are_refused_where_the_backend_joins_one():
    places = [("n", "10.0.0.1", ["0"]), ("n", "10.0.0.1", ["1"]), ("m", "10.0.0.2", ["0"]), ("n", "10.0.0.1", ["1"])]
    with pytest.raises(ConfigError, match=r"ranks 1 and 3 of one pool got GPU 1 of node 10.0.0.1, and nccl joins one"):
        Devices(PlatformCUDA(), share=0.5).check_apart(places)
    Devices(PlatformCUDA()).check_apart(places[:3])
    Devices(PlatformCPU(), share=0.5).check_apart([("n", "10.0.0.1", [])] * 2)


def test_the_shell_decides_the_environment_of_ranks_and_whether_ray_hides_devices(monkeypatch: pytest.MonkeyPatch):
    hides = "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"
    names = (*ray_cluster.RANK_ENVIRONMENT, hides, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    npu = PlatformNPU()
    assert ray_cluster.RANK_ENVIRONMENT.items() <= rank_environment(npu).items()
    assert hides not in rank_environment(npu)
    values = {"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "HF_HOME": "/models", hides: "1"}
    values |= {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "9", "KMP_BLOCKTIME": "1"}
    for name, value in {**values, "SECRET": "of the shell"}.items():
        monkeypatch.setenv(name, value)
    assert values.items() <= rank_environment(npu).items() and "SECRET" not in rank_environment(npu)
    assert hides not in rank_environment(PlatformCUDA())  # another vendor's
    assert "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" not in rank_environment(PlatformCUDA())
    assert rank_environment(PlatformROCm())["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "0"
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    assert rank_environment(PlatformROCm())["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] == "1"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """The arguments of every ray.init of a Ray that is not there; no head runs on this machine."""
    calls: list[dict[str, Any]] = []
    ray = SimpleNamespace(is_initialized=lambda: False, init=lambda **arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_cluster, "is_installed", lambda: True)
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ENABLE_AUTO_CONNECT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    return calls


def test_ray_address_goes_before_the_configured_one_a_local_head_and_a_ray_of_its_own(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert join_cluster({}).how == "started on this machine" and calls[-1]["address"] == "local"
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / ray_cluster.CURRENT_CLUSTER).write_text(address)
        assert join_cluster({}).how == f"joined {address} (the head of this machine)"
        assert join_cluster({"address": "local"}).how == "started on this machine"
        assert join_cluster({"address": "a:1"}).how == "joined a:1 (ray_kwargs.ray_init.address)"
        monkeypatch.setenv("RAY_ADDRESS", "b:2")
        assert join_cluster({"address": "a:1"}).how == "joined b:2 (RAY_ADDRESS)"
    assert [call["address"] for call in calls[1:]] == [address, "local", "a:1", "b:2"]


def test_what_is_given_to_ray_init_arrives_but_for_what_a_running_ray_refuses(calls: list[dict[str, Any]]):
    given = {"num_cpus": 3, "namespace": None, "runtime_env": {"py_executable": "/opt/python", "env_vars": None}}
    join_cluster(given)
    runtime_env = {"py_executable": "/opt/python"}
    assert calls[-1].items() >= {"num_cpus": 3, "runtime_env": runtime_env}.items() and "namespace" not in calls[-1]
    joined = join_cluster({**given, "address": "a:1"})
    assert "num_cpus" not in calls[-1] and calls[-1]["runtime_env"] == runtime_env
    assert joined.how.endswith("(ray_kwargs.ray_init: num_cpus without effect, it runs already)")


def test_an_address_where_no_ray_answers_is_a_mistake_that_names_its_key(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    def refuse(**arguments: Any) -> None:
        raise ConnectionError("nothing listens there\nand more")

    monkeypatch.setattr(sys.modules["ray"], "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "b:2")
    with pytest.raises(ConfigError, match=r"no Ray can be joined at b:2 \(RAY_ADDRESS\): nothing listens there; start"):
        join_cluster({})


@pytest.mark.parametrize(
    ("visible", "given", "device"), [("", "2", "2"), ("2", "2", "2"), ("0,2", "2", "1"), ("0,2", "0", "0")]
)
def test_a_rank_takes_the_device_that_ray_gave_it_also_where_ray_leaves_several_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str, given: str, device: str
):
    context = SimpleNamespace(get_accelerator_ids=lambda: {"CHIP": [given]}, get_node_id=lambda: "node")
    util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get_runtime_context=lambda: context, util=util))
    platform = FakePlatform()
    monkeypatch.setattr(ray_rank, "get_platform", lambda: platform)
    monkeypatch.setenv(platform.visible_devices_envvar(), visible)
    assert ray_rank.RankActor("rank 0").place("CHIP") == ("node", "10.0.0.1", [device])


@pytest.mark.parametrize(
    ("there", "nodes", "per_node", "beside", "nearest"),
    [
        ([8] * 15 + [4], 16, 8, 0, "trainer.nnodes=15 trainer.n_gpus_per_node=8"),  # 120 ranks; 16 x 4 are 64
        ([4] * 4, 2, 8, 0, "trainer.nnodes=4 trainer.n_gpus_per_node=4"),  # as many as were asked for
        ([8, 8, 8], 1, 12, 0, "trainer.nnodes=2 trainer.n_gpus_per_node=6"),
        ([8, 8], 2, 10, 4, "trainer.nnodes=2 trainer.n_gpus_per_node=4"),  # four for other roles on each
        ([4, 4], 2, 10, 4, None),
    ],
)
def test_the_nearest_plan_has_most_of_the_ranks_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, there: list[int], nodes: int, per_node: int, beside: int, nearest: str | None
):
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: [{"CPU": 64.0, "GPU": float(count)} for count in there])
    with pytest.raises(ConfigError) as caught:
        reserve(Devices(PlatformCUDA(), nodes), nodes * per_node, "the run", beside)
    found = str(caught.value).partition("the nearest that fits is ")[2].partition(";")[0]
    assert found == (nearest or "")


def test_devices_of_a_ray_whose_head_is_gone_are_given_back_without_an_error(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def remove(group: Any) -> None:
        asked.append(group)
        raise ConnectionError("the head does not answer")

    module = SimpleNamespace(remove_placement_group=remove)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", module)
    ray_cluster.release("group")
    assert asked == ["group"]


def test_a_rank_starts_where_its_node_has_no_room_for_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    variables = {"RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    for name in variables:
        monkeypatch.setenv(name, "")  # as it was, after the test
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    monkeypatch.setattr(ray_rank.RankActor, "_serve", lambda actor, build: None)
    actor = ray_rank.RankActor("rank 1")
    with pytest.warns(UserWarning, match="this node has no room for reports: a stall here has no stack: .*file"):
        place = actor.start(variables, False, os.getcwd(), "verl-ranks-1", dict)
    assert place.process == os.getpid()
    actor.server.record("update", ValueError("the driver hears of it by the reply"))
