"""Advice on the rollout engine's settings, as a run prints it."""

from pathlib import Path

import pytest

from tests.e2e import jobs
from verl.workers.rollout.native_engine import NativeEngine


def test_each_advice_is_printed_once_however_long_its_reason_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    quiet = {"engine_steps": 100.0, "waiting": 3.0, "cache_use": 0.9, "preemptions": 0.0}
    steps = iter([quiet, quiet | {"cache_use": 0.1}, quiet | {"cache_use": 0.2}, *[quiet | {"preemptions": 9.0}] * 2])
    monkeypatch.setattr(NativeEngine, "stats", lambda self: next(steps))
    jobs.prepare(tmp_path)
    jobs.train(tmp_path, "run", "trainer.total_training_steps=5", "trainer.val_before_train=False")
    said = [line for line in capsys.readouterr().out.splitlines() if "advice:" in line]
    assert len(said) == 2 and "used 10% of its cache" in said[0] and "preempted 9 requests" in said[1]
    assert jobs.metrics(tmp_path, "run")[3]["rollout/cache_use"] == 0.2
