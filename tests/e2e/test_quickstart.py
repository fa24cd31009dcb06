"""`verl quickstart` from nothing to a report; how far it learns is measured in benchmarks, not here."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl.commands.quickstart.command import main
from verl.trainer.ppo.trainer import PPOTrainer
from verl.trainer.sft.trainer import SFTTrainer


@pytest.fixture(autouse=True)
def _metrics_go_to_the_folder_of_the_quickstart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", "")  # so that what the command sets is undone
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT")
    monkeypatch.setattr("verl.commands.quickstart.stages.NUM_HELD_OUT", 20)


def interrupting(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, in which somebody presses Ctrl-C."""

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return method(*arguments)

    return interrupted


def test_the_quickstart_trains_saves_and_reports_also_in_two_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command = ["--out", str(tmp_path / "out"), "--steps", "4", "actor_rollout_ref.rollout.n=4"]
    monkeypatch.setattr("verl.commands.quickstart.stages.NUM_TIMED", 2)
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    with monkeypatch.context() as patch:
        patch.setattr(PPOTrainer, "step", interrupting(PPOTrainer.step))
        assert main(command) == 130
    first = capsys.readouterr()
    assert "stopped by Ctrl-C after step 1 of 4, which is saved in" in first.err
    assert first.err.rstrip().endswith("; the same command goes on from there") and "2/4  supervised" in first.out
    code = main(command)
    shown = capsys.readouterr().out
    assert code in (0, 1)  # four steps may or may not have helped
    assert "GRPO, going on after step 1" in shown and "supervised" not in shown
    assert "python3 -m verl.trainer.main_ppo" in shown and "held-out problems answered right" in shown
    assert "nothing reads it" not in shown
    assert shown.count("machine      busy: load 1000.0 on") == 1
    assert len(re.findall(r"\n     \d+\.\d\d s a step: about \d+s to go\n", shown)) == 1  # at step 3 of 4
    page = (tmp_path / "out" / "report.html").read_text()
    assert "held-out problems right after" in page and "http://" not in page and "https://" not in page
    assert 'aria-label="critic/score/mean over 4 steps' in page
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result.keys() == {"before", "after", "problems", "seconds"} and result["problems"] == 20
    assert list((tmp_path / "out" / "grpo").glob("global_step_4/actor/huggingface/model.safetensors"))
    with monkeypatch.context() as patch:  # a whole quickstart is done anew, as is one that was stopped in the warm-up
        patch.setattr(SFTTrainer, "update", interrupting(SFTTrainer.update))
        for _ in range(2):
            assert main(command) == 130
            again = capsys.readouterr()
            assert "1/4  a model" in again.out and "after step 1 of 140, which is saved in" in again.err
            assert again.err.rstrip().endswith("; the same command begins anew")


def test_an_unknown_override_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--out", str(tmp_path), "--steps", "1", "actor_rollout_ref.rollout.m=4"]) == 2
    assert "actor_rollout_ref.rollout" in capsys.readouterr().err
