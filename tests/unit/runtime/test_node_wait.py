"""Nodes of a Ray cluster that are missing are waited for, but not for ever."""

import itertools

import pytest

from verl.plugin.platform import choose_platform
from verl.runtime import ray_cluster
from verl.runtime.ray_cluster import Devices, await_nodes

SMALL, LARGE = {"CPU": 1.0}, {"CPU": 4.0}


class Clock:
    """Time that only sleep passes."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("wait_s", "found", "looked"),
    [
        (0.0, ([LARGE, SMALL], 1), 1),
        (60.0, ([LARGE, SMALL, LARGE], 2), 3),  # the third look finds a second node that is large enough
        (3.0, ([LARGE, SMALL], 1), 3),  # at 0, 2 and 4 s
    ],
)
def test_missing_nodes_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wait_s: float, found: tuple, looked: int
):
    looks = itertools.count(1)
    later = [LARGE] if wait_s > 30 else []
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: [LARGE, SMALL, *(later if next(looks) > 2 else [])])
    monkeypatch.setattr(ray_cluster, "NODE_POLL_S", 2.0)
    monkeypatch.setattr(ray_cluster, "time", Clock())
    devices = Devices(choose_platform("cpu"), num_nodes=2, wait_s=wait_s)
    assert await_nodes(devices, [devices.of_ranks(4)] * 2) == found
    assert next(looks) == looked + 1
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"1 of 2 nodes are there; waiting for the others for {wait_s:g} s (trainer.node_wait_s)"] * (
        wait_s > 0
    )


def test_bundles_of_unequal_size_get_a_node_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_cluster, "alive_nodes", lambda: [LARGE, SMALL])
    for bundles, fit in (([SMALL, LARGE], 2), ([LARGE, LARGE], 1), ([SMALL, SMALL, SMALL], 2)):
        assert await_nodes(Devices(choose_platform("cpu")), bundles)[1] == fit
