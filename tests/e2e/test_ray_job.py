"""`ray job submit -- python3 -m verl.trainer.main_ppo …` trains on the Ray that the job belongs to."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, import_or_skip
from tests.e2e import jobs

pytestmark = pytest.mark.ray
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
START_S = 120.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def job_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of the job server of a Ray with two cores, which asks for a token."""
    import_or_skip("ray")
    values = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    values |= {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    values |= {"VERL_FILE_LOGGER_ROOT": str(tmp_path / "metrics"), "OMP_NUM_THREADS": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    folder, port = tempfile.mkdtemp(prefix="ray", dir="/tmp"), free_port()
    options = ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={port}"]
    options += [f"--dashboard-agent-listen-port={free_port()}"]  # jobs start through it; another Ray has the usual one
    options += ["--num-cpus=2", f"--object-store-memory={100 << 20}", f"--temp-dir={folder}", f"--port={free_port()}"]
    head = subprocess.Popen([*RAY, "start", "--head", "--block", *options], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not listens(port):
            assert head.poll() is None and time.monotonic() < deadline, "no job server has started"
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        head.terminate()
        head.wait(60)  # it lets its node drain
        shutil.rmtree(folder, ignore_errors=True)


def test_a_submitted_job_trains_on_the_ray_it_belongs_to(tmp_path: Path, job_server: str):
    jobs.prepare(tmp_path)
    words = ["trainer.total_training_steps=1", "trainer.device=cpu", "trainer.n_gpus_per_node=2"]
    command = ["python3", "-m", "verl.trainer.main_ppo", *jobs.overrides(tmp_path, "job", *words)]
    submit = [*RAY, "job", "submit", f"--address={job_server}", "--", *command]
    done = subprocess.run(submit, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "(RAY_ADDRESS); 1 node, 2 CPU, asked for 2\n" in done.stdout  # auto: nothing names the runtime
    assert "succeeded" in done.stdout and list(jobs.metrics(tmp_path, "job"))[-1] == 1
