"""Copies of checkpoints: complete under their names, never over those of another run, or reported."""

import threading
from pathlib import Path

import pytest

from verl.trainer.run import checkpoint_copies
from verl.trainer.run.checkpoint_copies import CheckpointCopies
from verl.trainer.run.checkpoints import Checkpoints
from verl.utils import hadoop
from verl.utils.errors import ConfigError, DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        (tmp_path / "run" / f"global_step_{step}" / "actor").mkdir(parents=True)
        (tmp_path / "run" / f"global_step_{step}" / "actor" / "weights").write_text(f"of step {step}")
    return tmp_path / "run"


def test_a_checkpoint_and_the_number_of_the_newest_are_copied(root: Path, tmp_path: Path):
    lines: list[str] = []
    copies = CheckpointCopies(root, f"{tmp_path}/far/away/", lines.append)
    for step in (1, 2, 1):  # the first again, as after a resume: the copy there is replaced
        copies.start(root / f"global_step_{step}")
    copies.wait()
    far = tmp_path / "far" / "away"
    names = ["global_step_1", "global_step_2", "latest_checkpointed_iteration.txt"]
    assert sorted(path.name for path in far.iterdir()) == names and not copies.pending and copies.longest_s > 0
    assert (far / "global_step_1" / "actor" / "weights").read_text() == "of step 1"
    assert (far / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert lines[-1] == f"copied global_step_1 to {far}"


def test_a_copy_that_fails_is_reported_and_the_next_one_is_made(root: Path, tmp_path: Path):
    lines: list[str] = []
    copies = CheckpointCopies(root, str(tmp_path / "far"), lines.append)
    copies.start(root / "global_step_9")
    copies.start(root / "global_step_1")
    copies.wait()
    assert lines[0].startswith(f"warning: {root / 'global_step_9'} could not be copied to {tmp_path / 'far'}:")
    assert (
        lines[1:] == [f"copied global_step_1 to {tmp_path / 'far'}"] and not (tmp_path / "far/global_step_9").exists()
    )


def test_a_wait_for_copies_that_takes_long_says_for_which_ones(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    said = threading.Event()
    monkeypatch.setattr(checkpoint_copies, "SAID_AFTER_S", 0.01)
    monkeypatch.setattr(hadoop, "copy", lambda *_: said.wait(60))
    copies = CheckpointCopies(root, str(tmp_path / "far"), lambda line: (lines.append(line), said.set()))
    copies.start(root / "global_step_1")
    copies.wait()
    assert lines[0] == f"waiting until copied to {tmp_path / 'far'} (trainer.default_hdfs_dir): global_step_1"
    copies.wait()
    assert sum("waiting" in line for line in lines) == 1


def test_copies_go_neither_into_the_run_s_own_folder_nor_over_those_of_a_run_that_is_not_here(tmp_path: Path):
    for inside in (tmp_path / "run", tmp_path / "run" / "copies"):
        with pytest.raises(ConfigError, match="is the run's own folder"):
            Checkpoints(tmp_path / "run", {}, copy_to=str(inside))
    far = tmp_path / "far"
    far.mkdir()
    Checkpoints(tmp_path / "run", {}, copy_to=str(far))
    (far / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ConfigError, match="holds checkpoints of a run of this name"):
        Checkpoints(tmp_path / "run", {}, copy_to=str(far))


def test_a_checkpoint_is_not_deleted_while_it_is_copied(root: Path, tmp_path: Path):
    checkpoints = Checkpoints(root, {"actor": 1}, copy_to=str(tmp_path / "far"))
    assert checkpoints.copies is not None and checkpoints.seconds_to_save() == 120.0
    checkpoints.copies.pending.append(root / "global_step_1")
    checkpoints._drop(root / "global_step_1" / "actor")
    assert (root / "global_step_1" / "actor").is_dir()
    checkpoints.copies.pending.clear()
    checkpoints._drop(root / "global_step_1" / "actor")
    assert not (root / "global_step_1" / "actor").exists()


def test_hdfs_gets_a_folder_that_has_its_name_once_it_is_complete(root: Path, tmp_path: Path, monkeypatch):
    log = tmp_path / "log"
    (tmp_path / "hdfs").write_text(f'#!/bin/sh\necho "$@" >> {log}\ntest "$2" != -test\n')
    (tmp_path / "hdfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    copies = CheckpointCopies(root, "hdfs://far", lambda line: None)
    copies.check_target()
    copies.start(root / "global_step_1")
    copies.wait()
    done = [line.split(" ", 2)[1:] for line in log.read_text().splitlines() if " -test " not in line]
    assert done[-5:-1] == [
        ["-rm", "-r -f hdfs://far/.global_step_1.old.tmp"],
        ["-put", f"-f {root / 'global_step_1'} hdfs://far/.global_step_1.new.tmp"],
        ["-mv", "hdfs://far/.global_step_1.new.tmp hdfs://far/global_step_1"],
        ["-rm", "-r -f hdfs://far/.global_step_1.old.tmp"],
    ]
    assert done[-1][0] == "-put" and done[-1][1].endswith(" hdfs://far/latest_checkpointed_iteration.txt")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DataError, match="need the command `hdfs`"):
        copies.check_target()
