"""Collectives in which a device is: how torch tells them, and that CPU time spent in one is no move."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl.plugin.platform import PlatformCPU, PlatformCUDA, PlatformROCm
from verl.runtime import device_collectives
from verl.runtime.device_collectives import DeviceWait, read_device_waits, tell_device_waits
from verl.runtime.rank_observation import Counters
from verl.runtime.stall_watch import Progress

ENTERED = DeviceWait("0 (default_pg)", 7, "nccl:all_reduce", (0, 1))


@pytest.mark.parametrize(
    ("later", "moves"),
    [
        (Counters("R", 9.0, 500, 1, device_waits=(ENTERED,)), False),
        (Counters("R", 9.0, 500, 1, device_waits=(replace(ENTERED, number=8),)), True),
        (Counters("R", 9.0, 500, 1, device_waits=(ENTERED, replace(ENTERED, number=8))), True),
        (Counters("R", 9.0, 500, 1), True),  # not known, or a computation stands before the next one
        (Counters("R", 9.0, 501, 1, device_waits=(ENTERED,)), True),
        (Counters("t", 1.0, 500, 1, device_waits=(ENTERED,)), True),
    ],
)
def test_cpu_time_is_no_move_while_the_device_stays_in_one_collective(later: Counters, moves: bool):
    before = Counters("R", 1.0, 500, 1, device_waits=(ENTERED,))
    progress = Progress(before)
    progress.update(later, 10.0)
    assert progress.quiet_s == (0.0 if moves else 10.0)
    assert Progress(before).update_after_stacks(before, later, size=0) == moves


TRACE = {
    "entries": [
        {"state": state, "retired": retired, "process_group": ["3", "mesh_shard"], "is_p2p": is_p2p,
         "p2p_seq_id": 4, "collective_seq_id": number, "profiling_name": "nccl:all_gather"}
        for number, state, retired, is_p2p in [
            (6, "started", True, False), (7, "started", False, False), (8, "scheduled", False, False),
            (7, "started", False, True), (9, "completed", False, False),
        ]
    ],
    "pg_config": {"3": {"name": "3", "desc": "mesh_shard", "ranks": "[0, 2]"}},
}  # fmt: skip


def test_only_collectives_that_have_started_and_are_not_finished_are_waits():
    wait = DeviceWait("3 (mesh_shard)", 7, "nccl:all_gather", (0, 2))
    assert device_collectives._parse(json.dumps(TRACE).encode()) == (wait, replace(wait, number=4))


def test_a_rank_of_which_no_server_tells_has_no_waits(tmp_path: Path):
    assert read_device_waits(tmp_path, 0) == ()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "rank_0.waits.dump_nccl_trace_json"))
    assert read_device_waits(tmp_path, 0) == ()  # it has ended


def test_a_rank_whose_folder_has_too_long_a_name_for_a_socket_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(device_collectives, "get_platform", lambda: SimpleNamespace(collectives_handler=lambda: "ping"))
    monkeypatch.setenv(device_collectives.START_TIMES, "1")
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with pytest.warns(UserWarning, match="will not be seen: .*; set a shorter TMPDIR"):
        tell_device_waits(folder, 0)
    assert device_collectives.SERVER_SOCKET not in os.environ and read_device_waits(folder, 0) == ()


def test_the_handler_is_that_of_the_library_that_carries_the_collectives(monkeypatch: pytest.MonkeyPatch):
    assert PlatformCPU().collectives_handler() is None  # gloo sleeps
    assert PlatformCUDA().collectives_handler() == PlatformROCm().collectives_handler() == "dump_nccl_trace_json"
    monkeypatch.setenv("USE_FLAGCX", "1")
    assert PlatformCUDA().collectives_handler() is None
