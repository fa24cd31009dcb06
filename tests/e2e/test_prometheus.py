"""A real Prometheus reads a run that trains; what it answers is what the file tracker wrote."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml

from scripts import dashboards, draw_dashboard
from tests.conftest import skip_or_fail
from tests.e2e import jobs
from verl.config import load_config
from verl.trainer.sft_trainer import run_sft

PROMETHEUS = f"{jobs.ARR}.rollout.prometheus"
ALERTS = dashboards.FOLDER / "alerts.yml"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[int]:
    """The port of a Prometheus that scrapes five times a second, with a job of someone else in its file."""
    program = shutil.which("prometheus")
    if program is None:
        skip_or_fail("prometheus is not installed: bash .ci/install_system_packages.sh")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    content: dict[str, Any] = {"global": {"scrape_interval": "200ms", "scrape_timeout": "200ms"}}
    content |= {"rule_files": [str(ALERTS)], "scrape_configs": [{"job_name": "other", "static_configs": []}]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(content))
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    options += [f"--web.listen-address=127.0.0.1:{port}", "--web.enable-lifecycle"]
    with open(tmp_path / "prometheus.log", "wb") as log:
        process = subprocess.Popen([program, *options], stdout=log, stderr=log)
    try:
        for _ in range(300):
            try:
                urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=1).close()
                break
            except OSError:
                assert process.poll() is None, (tmp_path / "prometheus.log").read_text()
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait()


def ask(port: int, query: str) -> list[dict[str, Any]]:
    with urlopen(f"http://127.0.0.1:{port}/api/v1/query?{urlencode({'query': query})}", timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    return found["data"]["result"]


def test_prometheus_answers_with_the_numbers_of_the_file_tracker(tmp_path, server, monkeypatch, capsys):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    where = [f"{PROMETHEUS}.enable=True", f"{PROMETHEUS}.port={server}", f"{PROMETHEUS}.file={tmp_path}/prometheus.yml"]
    slow = "import time\n" + (tmp_path / "reward.py").read_text().replace(
        "    return", "    time.sleep(0.4)\n    return"
    )
    (tmp_path / "reward.py").write_text(slow)  # a step of a second or two: Prometheus takes up a target after five
    jobs.train(tmp_path, "run", *where, "trainer.total_training_steps=8", "trainer.save_freq=-1")
    assert "metrics for Prometheus: http://127.0.0.1:" in capsys.readouterr().out
    rows = jobs.metrics(tmp_path, "run")

    found = ask(server, 'verl_metric{experiment="run"}[10m]')
    by_name = {series["metric"]["name"]: dict(series["values"]) for series in found}
    steps = by_name["training/global_step"]
    compared = 0
    for name, values in by_name.items():
        for at, value in values.items():
            if at in steps:  # the same scrape
                assert float(value) == pytest.approx(rows[int(steps[at])][name], rel=1e-12), (name, steps[at])
                compared += 1
    assert compared > 200 and len(set(steps.values())) >= 3
    [total] = ask(server, 'max_over_time(verl_stage_seconds_total{stage="step"}[10m])')
    assert 0 < float(total["value"][1]) <= sum(row.get("timing_s/step", 0.0) for row in rows.values()) + 1e-6
    assert ask(server, 'verl_replica_count_total{count="generated_tokens"}[10m]')
    assert {s["metric"]["state"] for s in ask(server, "verl_answers[10m]")} == {"asked", "answered", "scored"}
    kept = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert [job["job_name"] for job in kept["scrape_configs"]] == ["other", "verl"]
    for name in dashboards.DASHBOARDS:
        for panel in dashboards.dashboard(name)["panels"]:
            ask(server, panel["targets"][0]["expr"].replace("$experiment", ".*"))
    drawn = draw_dashboard.page(f"http://127.0.0.1:{server}", "run", 10).split("<article>")[1:]
    assert len(drawn) == len(dashboards.DASHBOARDS["run"][1]) and "<path" in drawn[0] and "<li" in drawn[0]


def test_the_rules_of_alerts_are_valid(server):
    del server  # without it promtool is missing, too
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True)
    assert done.returncode == 0 and "6 rules found" in done.stdout, done.stdout + done.stderr


def test_the_committed_alerts_are_those_of_the_library():
    assert ALERTS.read_text() == dashboards.alerts_text()


@pytest.mark.parametrize("name", list(dashboards.DASHBOARDS))
def test_the_committed_dashboards_are_those_of_the_script(name):
    assert (dashboards.FOLDER / f"{name}.json").read_text() == dashboards.text(name)


def test_fine_tuning_exports_what_its_file_tracker_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    words = [f"model.path={tmp_path / 'model'}", f"data.train_files={tmp_path / 'data' / 'worked.jsonl'}"]
    words += ["data.train_batch_size=2", "data.max_length=64", "trainer.total_training_steps=3", "engine.dtype=float32"]
    words += ["trainer.logger=[file]", "trainer.save_freq=-1", f"trainer.default_local_dir={tmp_path / 'sft'}"]
    words += ["trainer.project_name=e2e", "trainer.experiment_name=sft", "trainer.prometheus_port=0"]
    scraped: list[str] = []

    def scrape_each_step(trainer: Any) -> None:
        url, log = trainer.tracking.backends["prometheus"].url, trainer.tracking.log

        def log_and_scrape(metrics: dict[str, float], step: int) -> None:
            log(metrics, step)
            with urlopen(url) as answer:
                scraped.append(answer.read().decode())

        trainer.tracking.log = log_and_scrape

    run_sft(load_config(words, config_name="sft_trainer"), before_steps=scrape_each_step)
    assert "metrics for Prometheus: http://127.0.0.1:" in capsys.readouterr().out
    rows = jobs.metrics(tmp_path, "sft")
    assert len(scraped) == 3
    for step, text in enumerate(scraped, start=1):
        pattern = r'verl_metric\{project="e2e",experiment="sft",name="([^"]+)"\} (\S+)'
        found = {name: float(value) for name, value in re.findall(pattern, text)}
        assert found == pytest.approx(rows[step]) and found["train/loss"] > 0
        assert f'verl_steps_total{{project="e2e",experiment="sft"}} {step}.0' in text
