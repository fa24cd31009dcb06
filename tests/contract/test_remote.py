"""The trainer's end of a rollout server, whose other end is the test."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl.config.rollout import RolloutConfig
from verl.plugin.platform import choose_platform
from verl.runtime.child import Child
from verl.runtime.wire import deserialize
from verl.utils.errors import WorkerError
from verl.workers.rollout.engines import start_all
from verl.workers.rollout.remote.engine import RemoteEngine
from verl.workers.rollout.remote.process import DriversSettings, LocalServer
from verl.workers.rollout.remote.server import encode_frame


def server_of(connection: socket.socket, process: Any, log: Path) -> LocalServer:
    """A server whose connection and process are the test's."""
    server = LocalServer.__new__(LocalServer)
    server.child = Child.__new__(Child)
    server.child.process, server.child.log, server.child._is_over = process, log, False
    server.socket, server.process, server.name = connection, process, "its process"
    return server


def test_an_answer_that_came_before_the_server_died_is_not_lost(tmp_path: Path):
    ours, server = socket.socketpair()
    log = tmp_path / "log"
    log.touch()
    process = subprocess.Popen(["true"])
    engine = RemoteEngine(RolloutConfig(name="vllm"), tmp_path, server=server_of(ours, process, log))
    reading, go_on = threading.Event(), threading.Event()

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


def test_nothing_that_a_dead_server_started_survives(tmp_path: Path):
    ours, theirs = socket.socketpair()
    child = "import os, subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); os._exit(1)"
    reading, writing = os.pipe()  # which the child holds open until it ends
    process = subprocess.Popen([sys.executable, "-c", child], stdout=writing, start_new_session=True)
    os.close(writing)
    with theirs, os.fdopen(reading) as output:
        pid = int(output.readline())
        server_of(ours, process, tmp_path / "log").stop()
        ended = select.select([output], [], [], 60)[0]
        if not ended:
            os.kill(pid, signal.SIGKILL)
    assert ended


def test_the_threads_of_servers_wait_as_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    program, shown = tmp_path / "python", tmp_path / "shown"
    program.write_text(f'#!/bin/sh\nprintf %s "$OMP_WAIT_POLICY" > {shown}\n')
    program.chmod(0o755)
    server = LocalServer(str(program), DriversSettings.on(choose_platform("cpu")).environment(()))
    assert server.process.wait(20.0) == 0 and shown.read_text() == "PASSIVE"
    server.stop()


def test_engines_are_closed_if_one_of_them_cannot_start():
    closed: list[int] = []

    class Engine(SimpleNamespace):
        def wait_until_ready(self) -> None:
            if self.number == 1:
                raise WorkerError(1, "start", "no memory")

        def close(self) -> None:
            closed.append(self.number)

    def build(number: int) -> Any:
        if number == 3:
            raise OSError("no more processes")
        return Engine(number=number)

    for count in (3, 4):
        with pytest.raises((WorkerError, OSError)):
            start_all(build, count)
        assert sorted(closed) == [0, 1, 2]
        closed.clear()
    assert len(start_all(build, 1)) == 1 and not closed


def test_calls_to_a_server_that_reads_nothing_return_at_once(tmp_path: Path):
    ours, server = socket.socketpair()
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    engine = RemoteEngine(RolloutConfig(name="vllm"), tmp_path, server=server_of(ours, process, tmp_path / "log"))
    calling = threading.Thread(target=lambda: [engine._call("x", text="x" * 2**20) for _ in range(8)], daemon=True)
    calling.start()
    calling.join(30)
    assert not calling.is_alive()
    with server, server.makefile("rb") as stream:  # all of them come, in their order
        frames = [stream.read(int.from_bytes(stream.read(8), "little")) for _ in range(9)]
    assert [deserialize(frame)[0] for frame in frames] == [*range(1, 10)]
    engine.server.kill()
    engine.close()
