"""Ctrl-C and SIGTERM before the first step: one sentence, the status of the signal, and nothing left behind."""

import gc
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import jobs
from verl.checks.findings import Findings
from verl.trainer import main_ppo, sft_trainer
from verl.trainer.ppo import run_setup, training_run
from verl.trainer.run.checkpoints import complete_steps
from verl.trainer.sft import trainer as sft
from verl.workers.rollout.native.core import NativeCore


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    jobs.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("stage", ["load", "validate"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_first_step_ends_the_run_with_its_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, stage: str, capsys: Any
):
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(number)
        if number == signal.SIGTERM:
            signal.raise_signal(number)

    async def validation(*_: Any) -> None:
        interrupted()

    if stage == "load":
        monkeypatch.setattr(run_setup, "build_run", interrupted)
    else:
        monkeypatch.setattr(training_run.Validation, "run", validation)
    assert main_ppo.main(jobs.overrides(folder, "run", "trainer.val_before_train=True")) == 128 + number
    said = capsys.readouterr().err
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert f"error: stopped by {name} before the first step; nothing was saved\n" in said and "Traceback" not in said
    assert complete_steps(folder / "run") == []
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)


def test_a_signal_inside_a_step_of_the_native_engine_prints_no_traceback(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(NativeCore, "step", lambda _: signal.raise_signal(signal.SIGINT))
    assert main_ppo.main(jobs.overrides(folder, "run", "trainer.val_before_train=True")) == 130
    gc.collect()  # asyncio reports a lost exception when its task is freed
    assert "error: stopped by Ctrl-C before the first step" in capsys.readouterr().err
    assert "never retrieved" not in caplog.text


def test_ctrl_c_twice_before_the_first_step_ends_with_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    def interrupted(*_: Any, **__: Any) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run_setup, "build_run", interrupted)
    assert main_ppo.main(jobs.overrides(folder, "run")) == 130
    said = capsys.readouterr().err
    assert "error: stopped by Ctrl-C before the first step; nothing was saved" in said and "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_fine_tuning_says_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, capsys: Any):
    monkeypatch.setattr(sft, "build_sft", lambda *_, **__: signal.raise_signal(number))
    monkeypatch.setattr(sft_trainer, "early_findings", lambda config: Findings())
    words = [
        f"model.path={tmp_path}",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        f"data.train_files={tmp_path}/x",
    ]
    assert sft_trainer.main([*words, "trainer.device=cpu"]) == 128 + number
    assert "before the first step; nothing was saved" in capsys.readouterr().err
