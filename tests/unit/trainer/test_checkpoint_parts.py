"""A checkpoint is one thing: no part of it can come from another one, and files beside it do not matter."""

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e.test_resume import damage, save
from verl.config.trainer import TrainerConfig
from verl.trainer.run.checkpoints import Checkpoints, complete_steps
from verl.trainer.run.resume import find_resume
from verl.utils.checksummed import read_checksummed, write_checksummed
from verl.utils.errors import CheckpointError, WorkerError


def found(root: Path) -> Path | None:
    return find_resume(TrainerConfig(default_local_dir=str(root)), ["actor"])


def swap_state(root: Path) -> None:
    shutil.copy(root / "global_step_1" / "trainer.json", root / "global_step_2" / "trainer.json")


def swap_state_but_for_the_step(root: Path) -> None:
    state = read_checksummed(root / "global_step_1" / "trainer.json")
    state["saved_with"]["step"] = 2
    write_checksummed(root / "global_step_2" / "trainer.json", state)


def swap_role(root: Path) -> None:
    shutil.rmtree(root / "global_step_2" / "actor")
    shutil.copytree(root / "global_step_1" / "actor", root / "global_step_2" / "actor")


def swap_folder(root: Path) -> None:
    shutil.rmtree(root / "global_step_2")
    shutil.copytree(root / "global_step_1", root / "global_step_2")


def cut_state(root: Path) -> None:
    damage(root / "global_step_2", "trainer.json", "cut")


@pytest.mark.parametrize("how", [swap_state, swap_state_but_for_the_step, swap_role, swap_folder, cut_state])
def test_a_part_of_another_checkpoint_is_refused_by_name(tmp_path: Path, how, caplog: pytest.LogCaptureFixture):
    save(tmp_path, 1, 2)
    write_checksummed(tmp_path / "global_step_1" / "actor" / "manifest.json", {"format": 2, "files": {}})
    save(tmp_path, 2)  # so that the two manifests differ
    record_again(tmp_path / "global_step_1")
    how(tmp_path)
    assert found(tmp_path) == tmp_path / "global_step_1"
    assert "not resuming from step 2" in caplog.text and "global_step_2" in caplog.text
    path = str(tmp_path / "global_step_2")
    with pytest.raises(CheckpointError, match=r"global_step_2.*(trainer|manifest)\.json|trainer.json"):
        find_resume(TrainerConfig(resume_mode="resume_path", resume_from_path=path), ["actor"])


def record_again(folder: Path) -> None:
    """Record what the role holds now."""
    from verl.models.tensor_file import file_digest

    state = read_checksummed(folder / "trainer.json")
    state["saved_with"]["manifests"]["actor"] = file_digest(folder / "actor" / "manifest.json")
    write_checksummed(folder / "trainer.json", state)


def test_a_checkpoint_without_that_record_is_one_of_an_earlier_version(tmp_path: Path):
    save(tmp_path, 1)
    write_checksummed(tmp_path / "global_step_1" / "trainer.json", {"global_step": 1})
    assert found(tmp_path) == tmp_path / "global_step_1"
    (tmp_path / "global_step_1").rename(tmp_path / "global_step_4")
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    with pytest.raises(CheckpointError, match="written at step 1, but its folder is called global_step_4"):
        found(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\xfe1", b"", b"1.5", "²".encode(), b"9" * 4000])
def test_a_marker_that_cannot_be_read_is_said(tmp_path: Path, content: bytes):
    save(tmp_path, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration.txt .*delete"):
        found(tmp_path)


def test_a_marker_that_is_a_folder_is_said(tmp_path: Path):
    save(tmp_path, 1)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        found(tmp_path)


def test_newer_checkpoints_that_the_marker_passes_over_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save(tmp_path, 1, 2, 3)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert found(tmp_path) == tmp_path / "global_step_1"
    assert "passing over the checkpoints of steps [2, 3]" in caplog.text


def test_stray_files_beside_checkpoints_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    save(tmp_path, 1)
    for name in ("global_step_7", "global_step_x", "notes.txt", ".mine.tmp"):
        (tmp_path / name).write_text("stray")
    for name in ("global_step_8", "global_step_009", "global_step_²", "global_step_9 (copy)"):
        (tmp_path / name).mkdir()
    shutil.copy(tmp_path / "global_step_1" / "trainer.json", tmp_path / "global_step_009")
    with caplog.at_level(logging.WARNING):
        assert complete_steps(tmp_path) == [1] and found(tmp_path) == tmp_path / "global_step_1"
    assert caplog.text == "" and (tmp_path / ".mine.tmp").read_text() == "stray"
    save(tmp_path, 7)  # takes the place of the file
    assert complete_steps(tmp_path) == [1, 7]


@pytest.mark.parametrize("how", ["flipped", "deleted"])
def test_a_damaged_model_for_other_programs_is_said_and_the_run_goes_on(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
):
    save(tmp_path, 1)
    actor = tmp_path / "global_step_1" / "actor"
    (actor / "huggingface").mkdir()
    (actor / "huggingface" / "config.json").write_text("{...}")
    manifest = read_checksummed(actor / "manifest.json")
    manifest["files"]["huggingface/config.json"] = "0" * 64
    write_checksummed(actor / "manifest.json", manifest)
    record_again(tmp_path / "global_step_1")
    if how == "deleted":
        (actor / "huggingface" / "config.json").unlink()
    assert found(tmp_path) == tmp_path / "global_step_1"
    assert "huggingface/config.json is" in caplog.text and "verl merge" in caplog.text


@pytest.mark.parametrize("kind", ["is_death", "is_stall", ""])
@pytest.mark.parametrize("fails", ["save", "finish_save"])
def test_a_rank_that_is_lost_in_a_save_is_no_failure_of_the_save(tmp_path: Path, fails: str, kind: str):
    error = WorkerError(1, "actor.save", "its process was killed", **({kind: True} if kind else {}))

    def fail(*given: object) -> bool:
        raise error

    role = SimpleNamespace(**{"save": lambda folder: None, "finish_save": lambda wait: True, fails: fail})
    checkpoints = Checkpoints(tmp_path, {"actor": None})
    with pytest.raises(WorkerError if kind else CheckpointError) as caught:
        checkpoints.save(3, {}, {"actor": role})
        checkpoints.finish_pending(wait=True)
    assert (caught.value is error) == bool(kind)
    assert not list(tmp_path.iterdir())  # what was written until then
    checkpoints.finish_all()
