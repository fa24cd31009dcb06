"""Runs whose tracker fails: they end, or go on where they are asked to."""

from pathlib import Path

import pytest

from tests.e2e import jobs, test_sft
from verl.observe.trackers import ConsoleBackend
from verl.observe.tracking import BACKENDS, TrackingError


class Unreachable(ConsoleBackend):
    def log(self, data: dict[str, float], step: int) -> None:
        raise OSError("no route to host")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", str(tmp_path / "metrics"))
    monkeypatch.setitem(BACKENDS, "trackio", Unreachable)
    jobs.prepare(tmp_path)
    return tmp_path


LOGGER = ("trainer.logger=[trackio,file]", "trainer.total_training_steps=2")
WARN = "trainer.tracker_errors=warn"
SAID = ("warning: tracker 'trackio' failed to log: no route to host; the run goes on", "failed 2 times in this run")


def test_training_goes_on_without_a_tracker_that_fails_if_asked(folder: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(TrackingError, match="'trackio' failed to log: no route to host"):
        jobs.train(folder, "ends", *LOGGER, "trainer.val_before_train=False")
    jobs.train(folder, "goes_on", *LOGGER, "trainer.val_before_train=False", WARN)
    assert list(jobs.metrics(folder, "goes_on")) == [1, 2]
    out = capsys.readouterr().out
    assert all(out.count(line) == 1 for line in SAID), out


def test_fine_tuning_goes_on_without_a_tracker_that_fails_if_asked(folder: Path, capsys: pytest.CaptureFixture[str]):
    test_sft.train(folder, "goes_on", *LOGGER, WARN)
    out = capsys.readouterr().out
    assert all(out.count(line) == 1 for line in SAID), out
