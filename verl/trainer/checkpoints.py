"""Checkpoints of a run on disk: written whole or not at all, perhaps in the background; the oldest dropped.

<root>/global_step_N/{actor,critic}/…     engine checkpoints; in N itself where there is one engine
<root>/global_step_N/trainer.json         step, data order, controller state; digest of the configuration
<root>/latest_checkpointed_iteration.txt  N of the newest complete one
"""

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from verl.utils.checksummed import write_checksummed
from verl.utils.errors import CheckpointError, ConfigError, WorkerError
from verl.utils.paths import atomic_write_text, publish_directory

LATEST_STEP_FILE = "latest_checkpointed_iteration.txt"
TRAINER_STATE_FILE = "trainer.json"
_STEP = re.compile(r"^global_step_(\d+)$")


class Saveable(Protocol):
    """Whoever has an engine to save."""

    def save(self, folder: Path) -> None:
        """Write into `folder`, or begin to."""

    def finish_save(self, wait: bool = True) -> bool:
        """Whether no save is under way any more."""


@dataclass(frozen=True)
class _PendingSave:
    step: int
    folder: Path
    state: dict[str, Any]
    roles: Mapping[str, Saveable]


class Checkpoints:
    """Saves below `root`; of each role the newest `keep[role]` stay (None: all). One save is under way at most.

    Where several ranks run the program (torchrun), each calls everything and the first writes what is the run's own.
    """

    def __init__(self, root: Path, keep: Mapping[str, int | None], note: Callable[[str], None] = print):
        self.root, self.keep, self.note = Path(root), keep, note
        try:
            self.root.mkdir(parents=True, exist_ok=True)  # not hours later, when there is something to save
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir={root} cannot be made ({error}); name another folder"
            ) from error
        self._pending: _PendingSave | None = None

    def save(self, step: int, state: dict[str, Any], roles: Mapping[str, Saveable]) -> None:
        """Each role fills its own sub-folder of `global_step_<step>` ("." is the folder itself), or begins to.

        Until `finish_pending` names it, and whenever the process is killed, the previous checkpoint stays in force:
        what a run that goes on from this one must find is written in between.
        """
        self.finish_pending(wait=True)
        folder = self.root / f".global_step_{step}.tmp"
        with self._clean_up_on_failure(step, folder):
            if is_rank_zero():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            for name, role in roles.items():
                role.save(folder / name)
        self._pending = _PendingSave(step, folder, state, roles)

    def finish_pending(self, wait: bool) -> None:
        """Give the checkpoint being saved its name, once all of it is written; then drop those that are too old."""
        pending = self._pending
        if pending is None:
            return
        target = step_folder(self.root, pending.step)
        with self._clean_up_on_failure(pending.step, pending.folder):
            if not all([role.finish_save(wait) for role in pending.roles.values()]):
                return
            self._pending = None
            if is_rank_zero():
                write_checksummed(pending.folder / TRAINER_STATE_FILE, pending.state)
                publish_directory(pending.folder, target)
                atomic_write_text(self.root / LATEST_STEP_FILE, str(pending.step))
        if is_rank_zero():
            self._prune(pending.step)
            self.note(f"saved {target}")

    @contextlib.contextmanager
    def _clean_up_on_failure(self, step: int, folder: Path) -> Iterator[None]:
        """What ends a save, as CheckpointError with what to do; the part that was written gives its room back."""
        try:
            yield
        except (OSError, CheckpointError, WorkerError) as error:
            self._pending = None
            if is_rank_zero():
                shutil.rmtree(folder, ignore_errors=True)
            steps = complete_steps(self.root)
            newest = f"goes on from {step_folder(self.root, steps[-1])}" if steps else "begins anew"
            raise CheckpointError(
                f"step {step} could not be saved in {self.root}: {str(error).rstrip()}\nRepair that "
                f"(is the disk full?), then run the same command: it {newest}"
            ) from error

    def log_and_finish_pending(self, log: Callable[[], None]) -> None:
        """Log the step, then finish the pending save: a run resumed from it lacks no line. A failed log loses none."""
        try:
            log()
        except Exception:
            self.finish_pending(wait=True)
            raise
        self.finish_pending(wait=False)

    def _prune(self, newest: int) -> None:
        """Drop what `keep` no longer wants. Steps after `newest` are of a line that was left, and do not count."""
        steps = [step for step in reversed(complete_steps(self.root)) if step <= newest]
        for role, count in self.keep.items():
            for step in steps[count:] if count else ():
                self._drop(step_folder(self.root, step) / role)
        for step in () if "." in self.keep else steps[1:]:  # all of whose roles were dropped
            folder = step_folder(self.root, step)
            if folder.is_dir() and not any(child.is_dir() for child in folder.iterdir()):
                self._drop(folder)

    def _drop(self, folder: Path) -> None:
        """Delete a folder; killed while at it, no part of it is left under its name."""
        if folder.is_dir():
            renamed = self.root / f".{'.'.join(folder.relative_to(self.root).parts)}.old.tmp"
            folder.rename(renamed)
            shutil.rmtree(renamed)


def is_rank_zero() -> bool:
    """Whether this process is the one that writes for the run."""
    return not dist.is_initialized() or dist.get_rank() == 0


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"global_step_{step}"


def complete_steps(root: Path) -> list[int]:
    """Steps with a whole checkpoint folder, ascending. Unfinished ones have other names."""
    if not Path(root).is_dir():
        return []
    matches = (_STEP.match(child.name) for child in Path(root).iterdir() if (child / TRAINER_STATE_FILE).is_file())
    return sorted(int(match.group(1)) for match in matches if match)
