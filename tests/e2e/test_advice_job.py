"""Advice on the rollout engine's settings, as a run prints it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import jobs
from verl.trainer.ppo.sources.trajectory_source import RolloutBatch, RolloutCollector


def test_each_advice_is_printed_once_however_long_its_reason_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    metrics = iter(
        {"engine_steps": 100.0, "waiting": 3.0, "cache_use": use, "preemptions": count}
        for use, count in zip([0.9, 0.1, 0.2, 0.9, 0.9], [0.0, 0.0, 0.0, 9.0, 9.0], strict=True)
    )
    collect = RolloutCollector.collect

    async def with_metrics(*arguments: Any, **options: Any) -> RolloutBatch:
        return replace(await collect(*arguments, **options), engine_stats=next(metrics))

    monkeypatch.setattr(RolloutCollector, "collect", with_metrics)
    jobs.prepare(tmp_path)
    jobs.train(tmp_path, "run", "trainer.total_training_steps=5", "trainer.val_before_train=False")
    said = [line for line in capsys.readouterr().out.splitlines() if "advice:" in line]
    assert len(said) == 2 and "used 10% of its cache" in said[0] and "preempted 9 requests" in said[1]
    assert jobs.metrics(tmp_path, "run")[3]["rollout/cache_use"] == 0.2
