"""A source of trajectories that is not ours: the trainer asks it for no more than `TrajectorySource` says."""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e import jobs
from verl.config import load_config
from verl.trainer.ppo.run_setup import build_run
from verl.trainer.ppo.sources.trajectory_source import RolloutBatch, TrajectorySource


class OtherSource(TrajectorySource):
    """Has what a source must have and nothing else; counts its batches."""

    def __init__(self, inner: TrajectorySource):
        self._inner, self._batches = inner, 0

    @property
    def epoch(self) -> int:
        return 10 + self._inner.epoch

    async def take(self, num_prompts: int) -> RolloutBatch:
        self._batches += 1
        return await self._inner.take(num_prompts)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._inner.state_dict(), "batches": self._batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._inner.load_state_dict(state["inner"])
        self._batches = state["batches"]

    def close(self) -> None:
        self._inner.close()


def train(folder: Path, run_name: str, steps: int) -> int:
    """Trains on another source; returns how many batches it gave in all processes of the run."""
    arguments = jobs.overrides(folder, run_name, f"trainer.total_training_steps={steps}", "trainer.save_freq=1")
    run = build_run(load_config(arguments))
    run.trainer.source = source = OtherSource(run.trainer.source)
    run.fit()
    run.trainer.close()
    return source._batches


def test_a_source_that_has_the_protocol_only_trains_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    jobs.prepare(tmp_path)
    assert train(tmp_path, "run", 2) == 2
    assert train(tmp_path, "run", 4) == 4
    jobs.train(tmp_path, "plain", "trainer.total_training_steps=4", "trainer.save_freq=1")
    ours, plain = (jobs.without_timings(jobs.metrics(tmp_path, run)) for run in ("run", "plain"))
    assert [row.pop("training/epoch") for row in (ours[1], plain[1])] == [10, 0]
    for step in (2, 3, 4):
        del ours[step]["training/epoch"], plain[step]["training/epoch"]
    assert ours == plain
