"""`verl quickstart` from nothing to a report; how far it learns is measured in benchmarks, not here."""

import json
from pathlib import Path

import pytest

from verl.commands.quickstart.stages import main


def test_the_quickstart_trains_saves_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT", raising=False)
    monkeypatch.setattr("verl.commands.quickstart.stages.NUM_HELD_OUT", 20)
    code = main(["--out", str(tmp_path / "out"), "--steps", "2", "actor_rollout_ref.rollout.n=4"])
    shown = capsys.readouterr().out
    assert code in (0, 1)  # two steps may or may not have helped
    assert "python3 -m verl.trainer.main_ppo" in shown and "held-out problems answered right" in shown
    assert "nothing reads it" not in shown
    page = (tmp_path / "out" / "report.html").read_text()
    assert "held-out problems right after" in page and "http://" not in page and "https://" not in page
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result.keys() == {"before", "after", "problems", "seconds"} and result["problems"] == 20
    assert list((tmp_path / "out" / "grpo").glob("global_step_2/actor/huggingface/model.safetensors"))


def test_an_unknown_override_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--out", str(tmp_path), "--steps", "1", "actor_rollout_ref.rollout.m=4"]) == 2
    assert "actor_rollout_ref.rollout" in capsys.readouterr().err
