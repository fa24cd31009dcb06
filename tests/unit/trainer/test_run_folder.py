"""Where a run may write: its own folder again, a free one, or nowhere."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from verl.config import load_config
from verl.observe.run_record import write_run_record
from verl.trainer.run.folder import RunPlace, claimed_run
from verl.utils.errors import ConfigError, DataError
from verl.utils.folder_lock import FolderInUseError, one_run_in

BASE = ["actor_rollout_ref.model.path=m", "trainer.project_name=p", "data.val_files=rows.jsonl"]
MINE = "trainer.experiment_name=mine"
MORE = "actor_rollout_ref.rollout.n=4"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.delenv("VERL_FILE_LOGGER_ROOT", raising=False)
    return tmp_path


def claim(*overrides: str) -> tuple[Any, RunPlace]:
    with claimed_run(load_config([*BASE, *overrides])) as found:
        return found


def begin(*overrides: str, logged: int = 0, saved: int = 0) -> Any:
    """What a run leaves that logged and saved so many steps."""
    with claimed_run(load_config([*BASE, *overrides])) as (config, _):
        root = Path(config.trainer.default_local_dir)
        write_run_record(root, config, 9)
        for step in range(1, logged + 1):
            log(Path("p") / f"{config.trainer.experiment_name}.jsonl", step)
        if saved:
            (root / f"global_step_{saved}").mkdir(parents=True)
            (root / f"global_step_{saved}" / "trainer.json").write_text("{}")
    return config


def log(path: Path, step: int) -> None:
    path.parent.mkdir(exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps({"step": step, "data": {}}) + "\n")


def test_a_run_without_a_name_takes_the_next_number_of_the_day():
    first, second = begin(logged=1), begin()
    assert re.fullmatch(r"ppo-\d{4}-\d\d-\d\d-1", first.trainer.experiment_name)
    assert second.trainer.experiment_name == first.trainer.experiment_name[:-1] + "2"
    assert second.trainer.default_local_dir == f"checkpoints/p/{second.trainer.experiment_name}"
    assert claim("algorithm.adv_estimator=grpo")[0].trainer.experiment_name.startswith("grpo-")


def test_two_runs_without_a_name_at_the_same_time_take_two_numbers():
    with claimed_run(load_config(BASE)) as (first, _), claimed_run(load_config(BASE)) as (second, _):
        assert (first.trainer.experiment_name[-1], second.trainer.experiment_name[-1]) == ("1", "2")
    assert not Path(first.trainer.default_local_dir).exists()  # nothing was written there


def test_the_first_line_names_the_run_of_the_same_configuration_that_may_be_continued():
    begin(MORE, logged=5, saved=5)
    wanted = begin(saved=3, logged=3).trainer.experiment_name
    begin(logged=9)  # saved nothing
    _, place = claim("trainer.total_epochs=99")
    assert place.state == f"new; to continue the last one (step 3 of 9), add trainer.experiment_name={wanted}"
    config, place = claim("trainer.on_existing=resume")
    assert config.trainer.experiment_name == wanted and place.state == "continues after step 3"


def test_a_folder_of_its_own_keeps_the_name_that_its_run_took():
    place = "trainer.default_local_dir=own"
    name = begin(place, saved=2).trainer.experiment_name
    config, found = claim(place)
    assert config.trainer.experiment_name == name and found.state == "continues after step 2"
    with pytest.raises(ConfigError, match=r"another configuration .*rollout.n 1 -> 4.*default_local_dir=DIR"):
        claim(place, MORE)
    assert claim(place, MORE, "trainer.on_existing=rename")[0].trainer.default_local_dir == "own-2"


def test_steps_that_were_only_logged_or_belong_to_a_run_elsewhere_stop_too():
    log(Path("p/mine.jsonl"), 7)
    with pytest.raises(ConfigError, match=r"p/mine.jsonl already holds steps up to 7"):
        claim(MINE)
    assert claim(MINE, "trainer.on_existing=rename")[0].trainer.experiment_name == "mine-2"
    with pytest.raises(ConfigError, match="already holds steps"):
        claim(MINE, "trainer.on_existing=resume")  # there is nothing to go on from
    assert claim(MINE, "trainer.logger=[console]")[1].state == "new"


def test_a_metrics_file_for_all_runs_cannot_be_solved_by_a_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "all.jsonl")
    log(Path("all.jsonl"), 3)
    for how in (MINE, "trainer.experiment_name=auto", "trainer.on_existing=rename"):
        with pytest.raises(ConfigError, match="VERL_FILE_LOGGER_PATH"):
            claim(how)


def test_an_attempt_without_a_step_and_a_run_of_an_earlier_version_stop_nobody():
    begin(MINE)
    assert claim(MINE, MORE)[1].state == "new"
    (Path(begin(MINE, saved=4).trainer.default_local_dir) / "run.json").unlink()
    assert claim(MINE, MORE)[1].state == "continues after step 4"


def test_disable_and_a_start_elsewhere_stop_but_validation_alone_does_not(tmp_path: Path):
    begin(MINE, logged=2, saved=2)
    for how in (["disable"], ["resume_path", f"trainer.resume_from_path={tmp_path}/other/global_step_1"]):
        overrides = [f"trainer.resume_mode={how[0]}", *how[1:]]
        with pytest.raises(ConfigError, match="would overwrite"):
            claim(MINE, *overrides)
    held = ["trainer.val_only=True", "trainer.resume_mode=disable"]
    assert claim(MINE, *held)[1].state == "validation alone"
    back = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=checkpoints/p/mine/global_step_2"]
    assert claim(MINE, *back)[1].state == "continues from checkpoints/p/mine/global_step_2"


def test_readable_answers_of_an_earlier_run_stay_too():
    Path("dumps").mkdir()
    Path("dumps/1.jsonl").write_text("")
    config, _ = claim("trainer.rollout_data_dir=dumps", "trainer.validation_data_dir=other")
    assert config.trainer.rollout_data_dir == "dumps-2" and config.trainer.validation_data_dir == "other"


def test_a_run_in_progress_is_not_renamed_away_from():
    with one_run_in("checkpoints/p/mine", "trainer.default_local_dir"), pytest.raises(FolderInUseError):
        claim(MINE, "trainer.on_existing=rename")


def test_a_flipped_digit_in_the_record_is_damage_and_no_other_configuration():
    config = begin(MINE, MORE, logged=3, saved=3)
    file = Path(config.trainer.default_local_dir) / "run.json"
    file.write_text(file.read_text().replace('"n": 4', '"n": 5'))
    _, place = claim(MINE, MORE)
    assert place.state == "continues after step 3"
    assert "run.json is damaged" in place.lines[0] and "digest" in place.lines[0]
    assert "its configuration is not compared" in place.lines[0]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe", b"[" * 100_000, b"[]", b'{"name": "x"}',
        b'{"name": "x", "metrics": null, "total_steps": 1e999, "config": {}}',
        b'{"name": "x", "metrics": null, "total_steps": 1, "config": {"trainer": 3}}',
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_read_is_said_and_stops_no_resume(content: bytes):
    config = begin(MINE, logged=3, saved=3)
    (Path(config.trainer.default_local_dir) / "run.json").write_bytes(content)
    _, place = claim(MINE)
    assert place.state == "continues after step 3" and "run.json is damaged" in place.lines[0]
    claim()  # a run without a name looks at all earlier ones


def test_the_record_of_an_earlier_version_has_no_digest_and_is_compared():
    config = begin(MINE, MORE, logged=3, saved=3)
    file = Path(config.trainer.default_local_dir) / "run.json"
    record = json.loads(file.read_text())
    del record["sha256"]
    file.write_text(json.dumps(record))
    assert claim(MINE, MORE)[1] == RunPlace("continues after step 3")
    with pytest.raises(ConfigError, match=r"another configuration \(actor_rollout_ref.rollout.n 4 -> 1"):
        claim(MINE)


def test_links_and_folders_in_the_place_of_the_record_are_said_in_one_line():
    config = begin(MINE, logged=3, saved=3)
    file = Path(config.trainer.default_local_dir) / "run.json"
    file.unlink()
    file.symlink_to("gone")
    assert claim(MINE)[1].state == "continues after step 3"
    claim()
    file.unlink()
    file.mkdir()
    assert "run.json is damaged" in claim(MINE)[1].lines[0]
    with pytest.raises(DataError, match="is a folder, where the run's record belongs"):
        write_run_record(file.parent, config, 9)


@pytest.mark.parametrize("name", ["run.json", "fastest.json", "run.lock", "ledger/step_000001.parquet"])
def test_a_pipe_among_the_records_of_a_run_is_refused_and_never_waited_for(name: str):
    config = begin(MINE, logged=3, saved=3)
    file = Path(config.trainer.default_local_dir) / name
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=f"{name.rpartition('/')[2]} is a pipe or a device"):
        claim(MINE)
