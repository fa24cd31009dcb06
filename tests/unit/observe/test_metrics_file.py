"""A metrics file that somebody else cuts, empties or removes: said in one line, and begun again."""

import shutil
from pathlib import Path

import pytest

from verl.observe import trackers
from verl.observe.tracking import Tracking


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("VERL_FILE_LOGGER_PATH", "VERL_FILE_LOGGER_ROOT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("harm", ["removed", "emptied", "cut"])
def test_a_metrics_file_that_lost_lines_behind_the_resumed_step_is_said(harm: str, caplog):
    path = Path("p/e.jsonl")
    with Tracking("p", "e", ["file"]) as tracking:
        for step in range(1, 6):
            tracking.log({"a": step}, step)
        tracking.rewind(4)
    assert not caplog.records
    lines = path.read_text().splitlines(keepends=True)
    path.unlink() if harm == "removed" else path.write_text("" if harm == "emptied" else "".join(lines[:2]))
    with Tracking("p", "e", ["file"]) as tracking:
        tracking.rewind(4)
        tracking.log({"a": 5}, 5)
    [said] = [record.getMessage() for record in caplog.records]
    assert f"has no line of {2 if harm == 'cut' else 4} of the 4 steps before this start" in said
    assert [r["step"] for r in trackers.read_metrics(path)] == ([1, 2] if harm == "cut" else []) + [5]


@pytest.mark.parametrize("harm", ["folder", "file", "cut", "replaced"])
def test_a_metrics_file_that_somebody_takes_away_during_a_run_is_begun_again(harm: str, caplog):
    path = Path("p/e.jsonl")
    with Tracking("p", "e", ["file"]) as tracking:
        tracking.log({"a": 1}, 1)
        tracking.log({"a": 2}, 2)
        if harm == "folder":
            shutil.rmtree("p")
        elif harm == "cut":
            path.write_text("")
        else:
            path.unlink()
        if harm == "replaced":
            path.write_text('{"step": 1, "data": {}}\n')
        tracking.log({"a": 3}, 3)
        tracking.log({"a": 4}, 4)
    [said] = [record.getMessage() for record in caplog.records]
    assert "was removed or cut while the run writes it" in said
    assert [r["step"] for r in trackers.read_metrics(path)] == ([1] if harm == "replaced" else []) + [3, 4]
