"""One run per folder: the second is told who holds it, and a holder that died holds nothing."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl.utils.errors import ConfigError
from verl.utils.folder_lock import LOCK_FILE, one_run_in

HOLDER = """
import os, sys, time
from verl.utils.folder_lock import one_run_in
with one_run_in(sys.argv[1], "key"):
    if os.fork() == 0:  # a child that outlives the holder
        print(os.getpid(), flush=True)
        time.sleep(600)
    time.sleep(600)
"""


def test_a_second_run_is_told_who_holds_the_folder_and_a_dead_holder_is_taken_over(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], env=environment, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        since = json.loads((tmp_path / LOCK_FILE).read_text())["since"]
        who = rf"host {socket.gethostname()}, process {holder.pid}, since "
        refusal = pytest.raises(ConfigError, match=rf"key={tmp_path} is in use by another run \({who}")
        with refusal as refused, one_run_in(tmp_path, "key"):
            pass
        assert since in str(refused.value)
        holder.kill()
        holder.wait()
        with one_run_in(tmp_path, "key"):
            assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    finally:
        os.kill(child, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_of_one_process_cannot_share_a_folder_either(tmp_path: Path):
    with one_run_in(tmp_path, "key"), pytest.raises(ConfigError, match="in use"), one_run_in(tmp_path, "key"):
        pass


def test_without_locks_of_the_file_system_the_named_process_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=subprocess.PIPE).stdout
    here = socket.gethostname()
    for host, pid, refused in ((here, os.getppid(), True), ("elsewhere", 1, True), (here, int(ended), False)):
        (tmp_path / LOCK_FILE).write_text(json.dumps({"host": host, "pid": pid, "since": "then"}))
        if refused:
            with pytest.raises(ConfigError, match=f"host {host}, process {pid}, since then"), one_run_in(tmp_path, "k"):
                pass
        else:
            with one_run_in(tmp_path, "k"):
                pass
