"""A run that sends traces of its conversations: as many as were asked for, with the rewards that it trained on."""

import json
from pathlib import Path

import pytest

from tests.e2e import jobs
from tests.otlp_receiver import attributes, receiving

TRACE = f"{jobs.ARR}.rollout.trace"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    return tmp_path


def test_a_run_sends_so_many_traces_a_step_with_what_it_trained_on(folder, monkeypatch):
    chosen = [f"{TRACE}.backend=opentelemetry", f"{TRACE}.max_samples_per_step_per_worker=2"]
    more = ["trainer.total_training_steps=3", f"trainer.rollout_data_dir={folder}/dumps", "trainer.test_freq=3"]
    with receiving(monkeypatch) as receiver:
        jobs.train(folder, "traced", *chosen, *more)
    assert {resource["verl.experiment"] for resource in receiver.resources} == {"traced"}
    roots = [attributes(root) for root in receiver.roots()]
    training = [root for root in roots if not root["verl.validate"]]
    assert sorted(root["verl.step"] for root in training) == [1] * 8 + [2] * 8 + [3] * 8  # two prompts, four answers
    assert {root["verl.step"] for root in roots if root["verl.validate"]} == {0, 3}
    for step in (1, 2, 3):
        rows = [json.loads(line) for line in (folder / "dumps" / f"{step}.jsonl").read_text().splitlines()]
        dumped = {(row["output"], row["score"]) for row in rows}
        traced = [root["output.value"] for root in training if root["verl.step"] == step]
        assert {(found["response"], found["reward"]) for found in traced} <= dumped
        assert {root["verl.policy_version_max"] for root in training if root["verl.step"] == step} == {step - 1}


def test_a_receiver_that_is_not_there_does_not_end_the_run(folder, monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    chosen = [f"{TRACE}.backend=opentelemetry", f"{TRACE}.max_samples_per_step_per_worker=1"]
    jobs.train(folder, "alone", *chosen, f"{jobs.ARR}.rollout.n=2", "trainer.total_training_steps=2")
    assert max(jobs.metrics(folder, "alone")) == 2
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert len([line for line in said if "rollout.trace.backend=opentelemetry failed" in line]) == 1
    assert "traces did not reach opentelemetry; 0 did" in "".join(said)


def test_a_run_without_a_backend_has_no_recorder(folder):
    from verl.config import load_config
    from verl.trainer.ppo.traces import record_traces

    assert record_traces(load_config(jobs.overrides(folder, "off")), None, print) is None
