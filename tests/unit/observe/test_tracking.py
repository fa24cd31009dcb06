"""Trackers: what was logged is what a reader of each tracker's own files finds."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import import_or_skip
from verl.observe import trackers
from verl.observe.tracking import BACKENDS, Tracking, TrackingError
from verl.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("VERL_FILE_LOGGER", "TENSORBOARD_DIR", "MLFLOW_", "WANDB_")):
            monkeypatch.delenv(name)


def test_file_lines_hold_step_and_numbers_and_are_readable_before_finish(tmp_path):
    tracking = Tracking("project", "run", "file")
    tracking.log({"a": 1.5, "b": 2}, step=1)
    assert json.loads(Path("project/run.jsonl").read_text()) == {"step": 1, "data": {"a": 1.5, "b": 2}}
    tracking.finish()


def test_file_path_comes_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "root"))
    Tracking("p", "e", ["file"]).finish()
    assert (tmp_path / "root" / "p" / "e.jsonl").exists()
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "x" / "m.jsonl"))
    Tracking("p", "e", ["file"]).finish()
    assert (tmp_path / "x" / "m.jsonl").exists()


def test_not_finite_values_survive_as_strict_json():
    with Tracking("p", "e", "file") as tracking:
        tracking.log({"nan": float("nan"), "inf": float("inf")}, step=1)
    record = json.loads(Path("p/e.jsonl").read_text(), parse_constant=lambda c: pytest.fail(f"not JSON: {c}"))
    assert record["data"] == {"nan": "nan", "inf": "inf"}
    assert trackers.read_metrics("p/e.jsonl")[0]["data"]["inf"] == float("inf")


def test_rewind_leaves_a_file_without_later_steps_as_it_is():
    text = '{"step": 1, "data": {"count": 3}}\n'
    path = Path("p/e.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    before = path.stat()
    with Tracking("p", "e", ["file"]) as tracking:
        tracking.rewind(1)
    assert path.read_text() == text and path.stat().st_ino == before.st_ino


def test_rewind_leaves_each_step_once_after_a_resume():
    with Tracking("p", "e", "file") as first:
        for step in (1, 2, 3, 4):
            first.log({"x": step}, step)
    with Tracking("p", "e", "file") as resumed:
        resumed.rewind(2)
        for step in (3, 4):
            resumed.log({"x": 10 * step}, step)
    seen = [(r["step"], r["data"]["x"]) for r in trackers.read_metrics("p/e.jsonl")]
    assert seen == [(1, 1), (2, 2), (3, 30), (4, 40)]


def test_a_line_cut_by_a_kill_is_dropped_before_the_next_is_written():
    with Tracking("p", "e", "file") as tracking:
        tracking.log({"x": 1}, 1)
    with open("p/e.jsonl", "a") as file:
        file.write('{"step": 2, "da')
    with Tracking("p", "e", "file") as tracking:
        tracking.log({"x": 2}, 2)
    assert [r["step"] for r in trackers.read_metrics("p/e.jsonl")] == [1, 2]


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    code = (
        "import itertools\nfrom verl.observe.tracking import Tracking\nt = Tracking('p', 'e', 'file')\n"
        "for i in itertools.count():\n    t.log({f'metric/{k}': i + 0.123 for k in range(60)}, i)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    path, deadline = tmp_path / "p" / "e.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline and (not path.exists() or path.stat().st_size < 100_000):
        time.sleep(0.01)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(len(lines))) and lines


def test_console_prints_one_line_with_the_headline_metrics(capsys):
    data = {"critic/score/mean": 0.25, "actor/grad_norm": 1.23456789, "perf/throughput": 1000.0, "odd/metric": 3.0}
    with Tracking("p", "e", "console") as tracking:
        tracking.log(data | {"val-core/gsm8k/reward/mean@1": 0.5, "distillation/loss": 1.5}, step=7)
    headlines = "val-core/gsm8k/reward/mean@1:0.5 score:0.25 distillation:1.5 grad_norm:1.235 tokens/s:1000"
    expected = f"step:7 {headlines} (+1 more)\n"
    assert capsys.readouterr().out == expected


def test_console_prints_everything_when_nothing_is_a_headline(capsys):
    with Tracking("p", "e", "console") as tracking:
        tracking.log({"odd": 1.0}, step=1)
    assert capsys.readouterr().out == "step:1 odd:1\n"


def test_a_tensor_of_one_number_is_logged_and_anything_else_is_refused_by_name():
    import torch

    with Tracking("p", "e", "file") as tracking:
        tracking.log({"x": torch.tensor(2.0)}, 1)
        with pytest.raises(TypeError, match=r"'words'.*str"):
            tracking.log({"words": "many"}, 2)
    assert trackers.read_metrics("p/e.jsonl") == [{"step": 1, "data": {"x": 2.0}}]


def test_tensorboard_files_hold_the_scalars_and_forget_the_rewound(monkeypatch, tmp_path):
    accumulator = import_or_skip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    with Tracking("p", "e", "tensorboard") as tracking:
        for step in (1, 2, 3):
            tracking.log({"critic/score/mean": step / 10}, step)
        tracking.rewind(1)
        tracking.log({"critic/score/mean": 0.9}, 2)
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    found = [(e.step, round(e.value, 6)) for e in events.Scalars("critic/score/mean")]
    assert found == [(1, 0.1), (2, 0.9)]


def leveldb_records(data, header=7, block=32768):
    """The records of a LevelDB log: chunks of (crc 4, length 2, type 1), type 1 whole, 2 first, 3 middle, 4 last."""
    position, parts = header, []
    while position + header <= len(data):
        if block - position % block < header:
            position += block - position % block
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if position + header + length > len(data):  # being written
            return
        parts.append(data[position + header : position + header + length])
        position += header + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def wandb_history(file):
    """(step, score) of every logged step in an offline run's file."""
    from wandb.proto import wandb_internal_pb2

    out = []
    for raw in leveldb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
            out.append((json.loads(items["_step"]), json.loads(items["critic/score/mean"])))
    return out


@pytest.fixture
def offline_wandb(monkeypatch):
    """Its process remembers the environment of the first run that it sees."""
    wandb = import_or_skip("wandb")
    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.teardown()


def test_wandb_offline_run_holds_the_metrics(offline_wandb, tmp_path):
    with Tracking("p", "e", "wandb", {"trainer": {"total_epochs": 3}}) as tracking:
        tracking.log({"critic/score/mean": 0.25}, 1)
        tracking.log({"critic/score/mean": 0.5}, 2)
    assert written(tmp_path, "*", 2) == [(1, 0.25), (2, 0.5)]


def written(folder, run, count):
    """wandb_history of the one run so named, once it has `count` steps: the library's own process writes the file."""
    deadline = time.monotonic() + 60
    while True:
        files = list(folder.glob(f"wandb/offline-run-*-{run}/*.wandb"))
        history = [point for file in files for point in wandb_history(file)]
        if len(history) >= count or time.monotonic() > deadline:
            assert len(files) == 1
            return history
        time.sleep(0.1)


def test_a_wandb_run_that_is_ahead_of_the_checkpoint_is_followed_by_a_new_one(offline_wandb, monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_RUN_ID", "first")
    with Tracking("p", "e", "wandb") as tracking:
        for step in (1, 2, 3):
            tracking.log({"critic/score/mean": step}, step)
        tracking.rewind(5)
        tracking.rewind(1)
        tracking.log({"critic/score/mean": 20}, 2)
    assert written(tmp_path, "first", 3) == [(1, 1), (2, 2), (3, 3)]
    assert written(tmp_path, "????????", 1) == [(2, 20)]


def test_a_config_dataclass_reaches_the_tracker_as_a_tree(monkeypatch):
    @dataclasses.dataclass
    class Inner:
        lr: float = 0.5

    @dataclasses.dataclass
    class Config:
        optim: Inner

    received = []
    monkeypatch.setitem(BACKENDS, "wandb", lambda run: received.append(run) or trackers.ConsoleBackend(run))
    Tracking("p", "e", "wandb", Config(Inner())).finish()
    assert received[0].config == {"optim": {"lr": 0.5}}


SAMPLES = [("2+2?\n", "4", "it | is <b>4</b>", 1.0), ("1+1?", "2", "3", None)]


def test_tensorboard_shows_answers_as_a_table_of_plain_text(monkeypatch, tmp_path):
    accumulator = import_or_skip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tb"))
    with Tracking("p", "e", ["tensorboard", "console", "file"]) as tracking:
        tracking.log_samples([], 1)
        tracking.log_samples(SAMPLES, 2)
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    [event] = events.Tensors("val/generations/text_summary")
    lines = event.tensor_proto.string_val[0].decode().splitlines()
    assert event.step == 2 and lines[:2] == ["| prompt | expected | answer | reward |", "| --- | --- | --- | --- |"]
    assert lines[2:] == ["| 2+2?<br> | 4 | it &#124; is &lt;b&gt;4&lt;/b&gt; | 1.0 |", "| 1+1? | 2 | 3 | None |"]


def test_wandb_gets_answers_as_a_table(offline_wandb, tmp_path):
    with Tracking("p", "e", "wandb") as tracking:
        tracking.log_samples(SAMPLES, 3)
        tracking.log({"critic/score/mean": 0.5}, 3)
    assert written(tmp_path, "*", 1) == [(3, 0.5)]
    [path] = tmp_path.glob("wandb/offline-run-*/files/media/table/val/generations_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["step", "prompt", "expected", "answer", "reward"]
    assert table["data"] == [[3, *sample] for sample in SAMPLES]


def mlflow_run(tmp_path, other_than=""):
    mlflow = import_or_skip("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    [run] = [run for run in runs if run.info.run_id != other_than]
    return client, run


def mlflow_table(client, run, folder):
    return json.loads(Path(client.download_artifacts(run.info.run_id, "val_generations.json", folder)).read_text())


def test_mlflow_gets_the_configuration_as_parameters_within_its_limits(tmp_path, monkeypatch):
    mlflow = import_or_skip("mlflow")
    sent, log_batch = [], mlflow.MlflowClient.log_batch
    counted = lambda *args, **more: sent.append(len(more.get("params", []))) or log_batch(*args, **more)  # noqa: E731
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", counted)
    many = {f"key{i}": i for i in range(230)}
    config = {"trainer": {**many, "long": "x" * 9000}, "lists": {"a": [1, "b"]}, "none": None, "empty": {}}
    with Tracking("p", "e", "mlflow", config) as tracking:
        tracking.log({"x": 1}, 1)
    _, run = mlflow_run(tmp_path)
    params = run.data.params
    assert params["trainer.key229"] == "229" and params["lists.a"] == '[1, "b"]' and params["none"] == "None"
    assert max(sent) == 100 and params["empty"] == "{}" and len(params) == 234 and params["trainer.long"] == "x" * 6000
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    with Tracking("p", "e", "mlflow", {"none": 5, "new": 7}):  # a value is written once
        pass
    params = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db").get_run(run.info.run_id).data.params
    assert params["none"] == "None" and params["new"] == "7"


def test_mlflow_collects_answers_in_a_table_and_a_rewound_run_keeps_the_earlier(tmp_path, monkeypatch):
    import_or_skip("mlflow")
    with Tracking("p", "e", "mlflow") as tracking:
        for step in (1, 2):
            tracking.log({"reward": step}, step)
            tracking.log_samples(SAMPLES, step)
    client, old = mlflow_run(tmp_path)
    (tmp_path / "old").mkdir()
    table = mlflow_table(client, old, tmp_path / "old")
    assert json.loads(old.data.tags["mlflow.loggedArtifacts"]) == [{"path": "val_generations.json", "type": "table"}]
    assert table["columns"] == ["step", "prompt", "expected", "answer", "reward"]
    assert table["data"] == [[step, *sample] for step in (1, 2) for sample in SAMPLES]
    monkeypatch.setenv("MLFLOW_RUN_ID", old.info.run_id)
    with Tracking("p", "e", "mlflow") as tracking:
        tracking.rewind(1)
    (tmp_path / "new").mkdir()
    client, new = mlflow_run(tmp_path, old.info.run_id)
    assert mlflow_table(client, new, tmp_path / "new")["data"] == [[1, *sample] for sample in SAMPLES]


def test_mlflow_keeps_the_metrics_in_a_local_database(tmp_path):
    mlflow = import_or_skip("mlflow")
    with Tracking("p", "e", "mlflow", {"a": {"b": 1}}) as tracking:
        tracking.log({"val-core/gsm8k/reward/mean@8": 0.25}, 1)
        tracking.log({"val-core/gsm8k/reward/mean@8": 0.5}, 2)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    points = client.get_metric_history(run.info.run_id, "val-core/gsm8k/reward/mean_at_8")
    assert sorted((p.step, p.value) for p in points) == [(1, 0.25), (2, 0.5)]
    assert run.info.status == "FINISHED" and run.info.run_name == "e"
    assert [f.path for f in client.list_artifacts(run.info.run_id)] == ["config.json"]


def test_an_mlflow_run_that_is_ahead_of_the_checkpoint_is_followed_by_one_without_what_came_later(
    tmp_path, monkeypatch
):
    mlflow = import_or_skip("mlflow")
    with Tracking("p", "e", "mlflow") as tracking:
        for step in (1, 2, 3):
            tracking.log({"reward": step, "loss": -step}, step)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    experiment = client.get_experiment_by_name("p").experiment_id
    (old,) = client.search_runs([experiment])
    monkeypatch.setenv("MLFLOW_RUN_ID", old.info.run_id)
    with Tracking("p", "e", "mlflow") as tracking:
        tracking.rewind(3)
        tracking.rewind(1)
        tracking.log({"reward": 20}, 2)
    (new,) = (run for run in client.search_runs([experiment]) if run.info.run_id != old.info.run_id)
    points = {name: client.get_metric_history(new.info.run_id, name) for name in ("reward", "loss")}
    assert {name: [(p.step, p.value) for p in of] for name, of in points.items()} == {
        "reward": [(1, 1.0), (2, 20.0)],
        "loss": [(1, -1.0)],
    }
    assert new.data.tags["continues"] == old.info.run_id


def test_a_run_that_raises_is_marked_failed(tmp_path):
    mlflow = import_or_skip("mlflow")
    with pytest.raises(ZeroDivisionError), Tracking("p", "e", "mlflow"):
        _ = 1 / 0
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert run.info.status == "FAILED"


def test_a_failing_tracker_names_itself_and_the_others_still_receive_the_step(monkeypatch):
    class Broken(trackers.ConsoleBackend):
        def log(self, data, step):
            raise OSError("no route to host")

    monkeypatch.setitem(BACKENDS, "wandb", Broken)
    tracking = Tracking("p", "e", ["wandb", "file"])
    with pytest.raises(TrackingError, match="'wandb' failed to log: no route to host"):
        tracking.log({"x": 1}, 1)
    assert [r["step"] for r in trackers.read_metrics("p/e.jsonl")] == [1]


def test_a_missing_library_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"'wandb'.*-e '\.\[trackers\]'"):
        Tracking("p", "e", "wandb")


def test_an_unknown_tracker_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        Tracking("p", "e", "tensorbord")
    with Tracking("p", "e", ["console"]) as tracking, pytest.raises(ConfigError, match="not part of this run"):
        tracking.log({"x": 1}, 1, backend="file")


def test_a_step_that_is_logged_again_keeps_one_line():
    with Tracking("p", "e", "file") as tracking:
        tracking.log({"x": 1}, 1)
        tracking.log({"x": 2}, 2)
    with Tracking("p", "e", "file") as tracking:
        tracking.log({"val": 5}, 1)
    assert [(r["step"], r["data"]) for r in trackers.read_metrics("p/e.jsonl")] == [
        (1, {"x": 1, "val": 5}),
        (2, {"x": 2}),
    ]


@pytest.mark.parametrize("line", ["not JSON", "[1]", '{"step": "a", "data": {}}', '{"step": 1}', "\x00"])
def test_a_line_that_is_no_record_does_not_stop_a_resume(line: str, caplog: pytest.LogCaptureFixture):
    with Tracking("p", "e", "file") as tracking:
        tracking.log({"x": 1}, 1)
    before = Path("p/e.jsonl").read_text() + line + "\n"
    Path("p/e.jsonl").write_text(before)
    with Tracking("p", "e", "file") as tracking:
        tracking.rewind(1)
        tracking.log({"x": 2}, 2)
    assert "e.jsonl: line 2 is no record" in caplog.text and Path("p/e.jsonl.unreadable").read_text() == before
    assert [json.loads(text)["step"] for text in Path("p/e.jsonl").read_text().splitlines()] == [1, 2]
