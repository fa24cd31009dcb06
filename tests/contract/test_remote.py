"""The trainer's end of a rollout server, whose other end is the test."""

import socket
import subprocess
import threading
from pathlib import Path

import pytest

from verl.config.rollout import RolloutConfig
from verl.utils.errors import WorkerError
from verl.workers.rollout import remote_engine
from verl.workers.rollout.engine_server import encode_frame


def test_an_answer_that_came_before_the_server_died_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours, server = socket.socketpair()
    log = tmp_path / "log"
    log.touch()
    process = subprocess.Popen(["true"])
    monkeypatch.setattr(remote_engine, "start_server", lambda python, devices: (ours, process, str(log)))
    engine, reading, go_on = remote_engine.RemoteEngine(RolloutConfig(), tmp_path), threading.Event(), threading.Event()

    def tell() -> None:
        reading.set()
        go_on.wait(60)

    first = engine._call("first", tell)  # number 2, after "start"
    server.sendall(encode_frame([2, None, []]) + encode_frame([2, True, 5]))
    reading.wait(60)
    server.close()
    second = engine._call("second")
    go_on.set()
    assert first.result(60) == 5
    for lost in (engine._started, second, engine._call("third")):
        assert isinstance(lost.exception(60), WorkerError)
    engine.close()
