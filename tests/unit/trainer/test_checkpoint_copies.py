"""Copies of checkpoints: complete under their names, or reported."""

from pathlib import Path

import pytest

from verl.trainer.checkpoint_copies import CheckpointCopies


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        (tmp_path / "run" / f"global_step_{step}" / "actor").mkdir(parents=True)
        (tmp_path / "run" / f"global_step_{step}" / "actor" / "weights").write_text(f"of step {step}")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    return tmp_path / "run"


def test_a_checkpoint_and_the_number_of_the_newest_are_copied(root: Path, tmp_path: Path):
    lines: list[str] = []
    copies = CheckpointCopies(f"{tmp_path}/far/away/", lines.append)
    for step in (1, 2, 1):  # the first again, as after a resume: the copy there is replaced
        copies.start(root / f"global_step_{step}")
    copies.wait()
    far = tmp_path / "far" / "away"
    assert sorted(path.name for path in far.iterdir()) == [
        "global_step_1",
        "global_step_2",
        "latest_checkpointed_iteration.txt",
    ]
    assert (far / "global_step_1" / "actor" / "weights").read_text() == "of step 1"
    assert lines[-1] == f"copied global_step_1 to {far}"


def test_a_copy_that_fails_is_reported_and_leaves_no_folder_under_its_name(root: Path, tmp_path: Path):
    lines: list[str] = []
    (tmp_path / "file").write_text("")
    copies = CheckpointCopies(str(tmp_path / "file" / "below"), lines.append)
    copies.start(root / "global_step_1")
    copies.wait()
    assert len(lines) == 1 and lines[0].startswith(f"warning: {root / 'global_step_1'} could not be copied to")


def test_hdfs_gets_a_folder_that_has_its_name_once_it_is_complete(root: Path, tmp_path: Path, monkeypatch):
    log = tmp_path / "log"
    (tmp_path / "hdfs").write_text(f'#!/bin/sh\necho "$@" >> {log}\ntest "$2" != -test\n')
    (tmp_path / "hdfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    copies = CheckpointCopies("hdfs://far", lambda line: None)
    copies.start(root / "global_step_1")
    copies.wait()
    assert log.read_text().splitlines()[-5:] == [
        "dfs -rm -r -f hdfs://far/.global_step_1.tmp",
        f"dfs -put -f {root / 'global_step_1'} hdfs://far/.global_step_1.tmp",
        "dfs -rm -r -f hdfs://far/global_step_1",
        "dfs -mv hdfs://far/.global_step_1.tmp hdfs://far/global_step_1",
        f"dfs -put -f {root / 'latest_checkpointed_iteration.txt'} hdfs://far/latest_checkpointed_iteration.txt",
    ]
