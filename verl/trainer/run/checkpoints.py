"""Checkpoints of a run: saved atomically, optionally in the background; the oldest are deleted.

<root>/global_step_N/{actor,critic}/…     engine checkpoints; directly in global_step_N if there is one engine
<root>/global_step_N/trainer.json         step, data order, controller state; sha256 of itself and every manifest
<root>/latest_checkpointed_iteration.txt  N of the newest complete one
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl.config.trainer import SFTTrainerConfig, TrainerConfig
from verl.models.tensor_file import file_digest
from verl.trainer.run.checkpoint_copies import CheckpointCopies
from verl.trainer.run.files import LATEST_STEP_FILE, TRAINER_STATE_FILE, complete_steps, step_folder
from verl.utils.checksummed import read_checksummed, write_checksummed
from verl.utils.errors import CheckpointError, WorkerError
from verl.utils.paths import atomic_write_text, make_writable_folder, publish_directory
from verl.workers.engine.manifest import MANIFEST, DamagedCheckpointError

FIRST_SAVE_S = 60.0  # assumed length of a save, or of a copy, until one has been timed
SAVED_WITH = "saved_with"  # in TRAINER_STATE_FILE: the step, and the sha256 of each role's manifest


class Saveable(Protocol):
    """A role whose engine can be saved."""

    def save(self, folder: Path) -> None:
        """Write into `folder`, or start to in the background."""

    def finish_save(self, wait: bool = True) -> bool:
        """Whether no save is in progress any more."""


@dataclass(frozen=True)
class _PendingSave:
    step: int
    folder: Path
    state: dict[str, Any]
    roles: Mapping[str, Saveable]


class Checkpoints:
    """Saves below `root`; keeps the newest `keep[role]` of each role (None: all). At most one save is in progress.

    Each is copied to the folder `copy_to`, if that is given.
    """

    def __init__(
        self,
        root: Path,
        keep: Mapping[str, int | None],
        note: Callable[[str], None] = print,
        copy_to: str | None = None,
    ):
        self.root, self.keep, self.note = make_writable_folder(root, "trainer.default_local_dir"), keep, note
        self.copies = CheckpointCopies(root, copy_to, note) if copy_to else None
        if self.copies is not None:
            self.copies.check_target()
        self.longest_save_s, self._began = 0.0, 0.0
        self._replaced: Path | None = None
        self._pending: _PendingSave | None = None

    def replace_next(self, folder: Path) -> None:
        """Delete the checkpoint `folder` when the next save is complete."""
        self._replaced = folder

    def save(self, step: int, state: dict[str, Any], roles: Mapping[str, Saveable]) -> None:
        """Write each role to its sub-folder of `global_step_<step>` ("." is the folder itself), or start to.

        Until `finish_pending` publishes it, a killed run resumes from the previous checkpoint. Write whatever a run
        resumed from this one needs before that call.
        """
        self.finish_pending(wait=True)
        self._began = time.monotonic()
        folder = self.root / f".global_step_{step}.tmp"
        with self._clean_up_on_failure(step, folder):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name, role in roles.items():
                role.save(folder / name)
        self._pending = _PendingSave(step, folder, state, roles)

    def finish_pending(self, wait: bool) -> None:
        """Publish the pending checkpoint once it is completely written; then delete the oldest ones."""
        pending = self._pending
        if pending is None:
            return
        target = step_folder(self.root, pending.step)
        with self._clean_up_on_failure(pending.step, pending.folder):
            if not all([role.finish_save(wait) for role in pending.roles.values()]):
                return
            self._pending = None
            manifests = {role: file_digest(pending.folder / role / MANIFEST) for role in pending.roles}
            record = {"step": pending.step, "manifests": manifests}
            write_checksummed(pending.folder / TRAINER_STATE_FILE, {**pending.state, SAVED_WITH: record})
            publish_directory(pending.folder, target)
            atomic_write_text(self.root / LATEST_STEP_FILE, str(pending.step))
        if self.copies is not None:
            self.copies.start(target)
        self.longest_save_s = max(self.longest_save_s, time.monotonic() - self._began)
        self._prune(pending.step)
        self.note(f"saved {target}")
        if self._replaced not in (None, target):
            self._drop(self._replaced)
            self.note(f"deleted {self._replaced}, which the run went on from (trainer.del_local_ckpt_after_load)")
        self._replaced = None

    @contextlib.contextmanager
    def _clean_up_on_failure(self, step: int, folder: Path) -> Iterator[None]:
        """Turn a failed save into CheckpointError with advice, and delete the partial checkpoint.

        A rank that is lost is no failure of the save.
        """
        try:
            yield
        except (OSError, CheckpointError, WorkerError) as error:
            self._pending = None
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, WorkerError) and (error.is_death or error.is_stall):
                raise
            steps = complete_steps(self.root)
            newest = f"goes on from {step_folder(self.root, steps[-1])}" if steps else "begins anew"
            raise CheckpointError(
                f"step {step} could not be saved in {self.root}: {str(error).rstrip()}\nRepair that "
                f"(is the disk full?), then run the same command under the name of this run: it {newest}"
            ) from error

    def finish_all(self) -> None:
        """Wait for the pending checkpoint, and until everything is copied."""
        self.finish_pending(wait=True)
        if self.copies is not None and self.copies.pending:
            self.wait_for_copies()
            self._prune(max(complete_steps(self.root), default=0))

    def wait_for_copies(self) -> None:
        """Wait until everything that is saved is copied."""
        if self.copies is not None:
            self.copies.wait()

    def seconds_to_save(self) -> float:
        """The longest save so far, and its copy; a minute each until there was one."""
        copying = () if self.copies is None else (self.copies.longest_s or FIRST_SAVE_S,)
        return sum(copying, start=self.longest_save_s or FIRST_SAVE_S)

    def log_and_finish_pending(self, log: Callable[[], None]) -> None:
        """Log the step, then finish the pending save, so that a resumed run lacks no line; also if logging fails."""
        try:
            log()
        except Exception:
            self.finish_pending(wait=True)
            raise
        self.finish_pending(wait=False)

    def _prune(self, newest: int) -> None:
        """Delete checkpoints beyond `keep`. Steps after `newest` belong to an abandoned run and do not count."""
        steps = [step for step in reversed(complete_steps(self.root)) if step <= newest]
        for role, count in self.keep.items():
            for step in steps[count:] if count else ():
                self._drop(step_folder(self.root, step) / role)
        for step in () if "." in self.keep else steps[1:]:  # all roles of these were deleted
            folder = step_folder(self.root, step)
            if folder.is_dir() and not any(child.is_dir() for child in folder.iterdir()):
                self._drop(folder)

    def _drop(self, folder: Path) -> None:
        """Rename a folder, then delete it: a kill leaves no partial folder under its name. Not while it is copied."""
        if self.copies is not None and any(copied in (folder, folder.parent) for copied in self.copies.pending):
            return
        if folder.is_dir():
            renamed = self.root / f".{'.'.join(folder.relative_to(self.root).parts)}.old.tmp"
            folder.rename(renamed)
            shutil.rmtree(renamed)


def folder_of_copies(settings: TrainerConfig | SFTTrainerConfig) -> str | None:
    """Where checkpoints are copied to: `default_hdfs_dir`/<project>/<experiment>, so that no run meets another's."""
    target = settings.default_hdfs_dir
    return target and f"{target.rstrip('/')}/{settings.project_name}/{settings.experiment_name}"


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer's state in a checkpoint; DamagedCheckpointError if it cannot be read, or is of another step."""
    path = folder / TRAINER_STATE_FILE
    try:
        state = read_checksummed(path)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}; use another checkpoint") from error
    named, written = (
        re.search(r"global_step_([0-9]+)", folder.name),
        saved_with(state).get("step", state.get("global_step")),
    )
    if named and written is not None and int(named.group(1)) != written:
        raise DamagedCheckpointError(
            f"{path} was written at step {written}, but its folder is called {folder.name}: one of them is a copy from "
            "another checkpoint; give the folder its own name back, or use another checkpoint"
        )
    return state


def check_role_manifest(folder: Path, state: dict[str, Any], role: str) -> None:
    """DamagedCheckpointError unless the role's files are those saved with `state`.

    The checkpoints of earlier versions lack this record, and pass.
    """
    path = folder / role / MANIFEST
    if SAVED_WITH in state and path.is_file() and saved_with(state)["manifests"].get(role) != file_digest(path):
        raise DamagedCheckpointError(
            f"{path} is not the one that {folder / TRAINER_STATE_FILE} was saved with: one of them is damaged or a "
            "copy from another checkpoint; use another checkpoint"
        )


def saved_with(state: dict[str, Any]) -> dict[str, Any]:
    """The step and the digests of the roles' manifests that `state` was saved with; empty for earlier versions."""
    return state.get(SAVED_WITH, {})
