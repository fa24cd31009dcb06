"""SwanLab, Trackio and ClearML without a network: what was logged is what their own files hold."""

import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, import_or_skip, skip_or_fail
from tests.unit.observe.test_tracking import leveldb_records
from verl.checks.machine import early_findings
from verl.config import load_config
from verl.observe.progress import Progress
from verl.observe.tracker_checks import check_trackers
from verl.observe.trackers import ConsoleBackend
from verl.observe.tracking import BACKENDS, Tracking, TrackingError
from verl.trainer.ppo.observers import Observers
from verl.utils.errors import ConfigError

SAMPLES = [("2+2?\n", "4", "it | is <b>4</b>", 1.0), ("1+1?", "2", "12", None)]
COLUMNS = ("step", "prompt", "expected", "answer", "reward")
SWANLAB = "swanlab==0.10.3"
RUN = """
import signal, sys
from verl.config import load_config
from verl.observe.tracker_checks import check_trackers
from verl.observe.tracking import BACKENDS, Tracking, TrackingError
name, samples, code = sys.argv[1], eval_samples, int(sys.argv[2])
before = signal.getsignal(signal.SIGINT)
tracking = Tracking("p", "e", name, {"trainer": {"total_epochs": 3}})
tracking.log({"critic/score/mean": 0.25, "actor/entropy": float("nan")}, 1)
tracking.log_samples(samples, 1)
tracking.rewind(5)
tracking.log({"critic/score/mean": 0.5}, 2)
assert signal.getsignal(signal.SIGINT) is before
tracking.finish(code)
assert signal.getsignal(signal.SIGINT) is before
""".replace("eval_samples", repr(SAMPLES))
READ = """
import json, sys
from google.protobuf.json_format import MessageToDict
from swanlab.proto.swanlab.record.v1.record_pb2 import Record
for line in sys.stdin:
    record = Record()
    record.ParseFromString(bytes.fromhex(line))
    print(json.dumps(MessageToDict(record)))
"""


def run(folder: Path, tracker: str, python: str = sys.executable, exit_code: int = 0, **environment: str) -> None:
    """Three steps of a run in a process of its own: these libraries read their variables when they are imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLEARML", "TRACKIO", "SWANLAB"))}
    environment = {**kept, "PYTHONPATH": str(ROOT), "HOME": str(folder), **environment}
    command = [python, "-c", RUN, tracker, str(exit_code)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("exit_code", [0, 1])
def test_trackio_keeps_the_run_in_its_database(tmp_path: Path, exit_code: int):
    import_or_skip("trackio")
    run(tmp_path, "trackio", exit_code=exit_code, TRACKIO_DIR=str(tmp_path / "db"))
    with sqlite3.connect(tmp_path / "db" / "p.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        [(config,)] = database.execute("select config from configs").fetchall()
        alerts = database.execute("select level, text from alerts").fetchall()
    logged = [(name, step, json.loads(metrics)) for name, step, metrics in rows]
    assert logged[0] == ("e", 1, {"critic/score/mean": 0.25, "actor/entropy": "NaN"})
    assert logged[2] == ("e", 2, {"critic/score/mean": 0.5})
    assert logged[1][2]["val/generations"]["_value"] == [
        dict(zip(COLUMNS, (1, *sample), strict=True)) for sample in SAMPLES
    ]
    assert json.loads(config)["trainer"] == {"total_epochs": 3}
    assert alerts == ([("error", "exit code 1")] if exit_code else [])


def test_clearml_keeps_an_offline_run_in_an_archive_and_says_what_it_would_draw_as_0(tmp_path: Path):
    import_or_skip("clearml")
    run(tmp_path, "clearml", CLEARML_OFFLINE_MODE="1", CLEARML_CACHE_DIR=str(tmp_path))
    [archive] = tmp_path.glob("offline/*.zip")
    with zipfile.ZipFile(archive) as files:
        task = json.loads(files.read("task.json"))
        events = [event for line in files.read("metrics.jsonl").splitlines() for event in json.loads(line)]
        log = files.read("log.jsonl").decode()
    assert (task["project_name"], task["name"]) == ("p", "e") and "total_epochs = 3" in str(task["configuration"])
    scalars = [event for event in events if event["type"] == "training_stats_scalar"]
    found = [(event["metric"], event["variant"], event["iter"], event["value"]) for event in scalars]
    assert found == [("critic/score", "mean", 1, 0.25), ("critic/score", "mean", 2, 0.5)]
    assert "step 1: actor/entropy is nan" in log
    [plot] = [event for event in events if event["type"] == "plot"]
    [table] = json.loads(plot["plot_str"])["data"]
    assert plot["metric"] == "val/generations" and plot["iter"] == 1
    assert [str(cell) for cell in table["header"]["values"]] == list(COLUMNS[1:])
    shown = list(zip(*table["cells"]["values"], strict=True))
    assert [(prompt, answer) for prompt, _, answer, _ in shown] == [(s[0], s[2]) for s in SAMPLES]


@pytest.fixture(scope="module")
def swanlab_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with SwanLab, whose protobuf is older than the one of the other trackers."""
    folder = tmp_path_factory.mktemp("swanlab")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, SWANLAB], capture_output=True, text=True, timeout=300)
    if done.returncode:
        skip_or_fail(f"{SWANLAB} cannot be installed: {done.stderr[-500:]}")
    return python


@pytest.mark.slow
def test_swanlab_keeps_an_offline_run_in_its_folder(tmp_path: Path, swanlab_python: str):
    run(tmp_path, "swanlab", swanlab_python, 1, SWANLAB_MODE="offline", SWANLAB_LOG_DIR=str(tmp_path / "logs"))
    [file] = tmp_path.glob("logs/run-*/run-*.swanlab")
    lines = "\n".join(record.hex() for record in leveldb_records(file.read_bytes()))
    read = subprocess.run([swanlab_python, "-c", READ], input=lines, capture_output=True, text=True, check=True)
    records: list[dict[str, Any]] = [json.loads(line) for line in read.stdout.splitlines()]
    scalars = [record["scalar"] for record in records if "scalar" in record]
    found = [(s["key"], int(s["step"]), s["value"]["number"]) for s in scalars]
    expected = [("critic/score/mean", 1, 0.25), ("actor/entropy", 1, "NaN"), ("critic/score/mean", 2, 0.5)]
    assert sorted(found, key=str) == sorted(expected, key=str)
    [finish] = [record["finish"] for record in records if "finish" in record]
    assert finish["state"] == "RUN_STATE_CRASHED" and finish["error"] == "exit code 1"
    assert not any("log" in record for record in records)  # the terminal is not copied
    [table] = [json.loads(path.read_text()) for path in file.parent.glob("media/echarts/*.json")]
    assert table["rowData"] == [dict(zip(COLUMNS, (1, *sample), strict=True)) for sample in SAMPLES]
    assert "total_epochs: 3" in (file.parent / "files" / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("tracker", "extra"), [("swanlab", "swanlab"), ("trackio", "trackers"), ("clearml", "trackers")]
)
def test_a_tracker_without_its_library_says_what_to_install(tracker: str, extra: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, tracker, None)
    with pytest.raises(ConfigError, match=rf"'{tracker}'.*-e '\.\[{extra}\]'"):
        Tracking("p", "e", tracker)


def test_a_refused_tracker_is_one_mistake_with_its_reason():
    config = load_config(["trainer.logger=[console,vemlp_wandb]", "actor_rollout_ref.model.path=/nowhere"])
    about = [str(error) for error in early_findings(config).errors if "vemlp_wandb" in str(error)]
    assert len(about) == 1 and "not on PyPI" in about[0] and "WANDB_BASE_URL" in about[0]


class Failing(ConsoleBackend):
    """Fails where its class says so."""

    fails: tuple[str, ...] = ()

    def __init__(self, run: Any):
        super().__init__(run)
        self._fail("init")

    def _fail(self, verb: str) -> None:
        if verb in self.fails:
            raise OSError(f"no route to {verb}")

    def log(self, data: dict[str, float], step: int) -> None:
        self._fail("log")

    def finish(self, exit_code: int) -> None:
        self._fail("finish")


@pytest.mark.parametrize("verb", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_named_and_does_not_end_a_run_that_asks_for_warnings(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    broken = type("Broken", (Failing,), {"fails": (verb,)})
    monkeypatch.setitem(BACKENDS, "wandb", broken)
    said: list[str] = []
    tracking = Tracking("p", "e", ["wandb", "file"], errors="warn", warn=said.append)
    for step in (1, 2, 3):
        tracking.log({"x": step}, step)
    tracking.finish()
    assert len((tmp_path / "p" / "e.jsonl").read_text().splitlines()) == 3
    assert f"no route to {verb}" in said[0] and "'wandb'" in said[0] and "the run goes on" in said[0]
    assert said[1:] == (["tracker 'wandb' failed 3 times in this run"] if verb == "log" else [])


def test_the_key_reaches_the_trackers_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setitem(BACKENDS, "wandb", type("Broken", (Failing,), {"fails": ("init",)}))
    monkeypatch.setattr("verl.observe.tracker_checks.has_module", lambda name: False)
    asked = ["trainer.logger=[console,wandb]", "trainer.tracker_errors=warn"]
    for key, config in (("warn", load_config(asked)), ("raise", load_config(asked[:1]))):
        assert config.trainer.tracker_errors == key
    with pytest.raises(ConfigError, match="wandb is not installed; pip install"):
        check_trackers(config.trainer.logger, config.trainer.tracker_errors)
    with pytest.raises(TrackingError, match="'wandb' could not start: no route to init"):
        Observers(config, None, Progress.silent())
    config = load_config(asked)
    check_trackers(config.trainer.logger, config.trainer.tracker_errors)
    assert list(Observers(config, None, Progress.silent()).tracking.backends) == ["console"]
    said = "warning: tracker 'wandb' could not start: no route to init; the run goes on without it\n"
    assert capsys.readouterr().out == said
