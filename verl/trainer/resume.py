"""Where a run continues: the newest checkpoint that is whole, or the one that was asked for."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.config.trainer import SFTTrainerConfig, TrainerConfig
from verl.trainer.checkpoints import LATEST, STATE, complete_steps, leads, step_folder
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import remove_leftovers
from verl.utils.sealed import read_sealed
from verl.workers.engine.manifest import DamagedCheckpoint, verify_folder

logger = logging.getLogger(__name__)

NOTHING, FAILED = -1, -2  # instead of a step


def find_resume(config: TrainerConfig | SFTTrainerConfig, roles: Sequence[str]) -> Path | None:
    """The checkpoint folder to continue from, or None to start afresh (`trainer.resume_mode`).

    All files of `roles` (sub-folders; "." is the folder itself) that a resumed run reads are compared with their
    digests. Among the newest, damaged ones are skipped with a warning; one that was asked for is refused.
    """
    mode = config.resume_mode
    if mode == "disable":
        return None
    if mode == "resume_path":
        folder = _explicit(config.resume_from_path)
        if leads():
            verify_checkpoint(folder, roles)
        return folder
    if mode != "auto":
        raise ConfigError(f"trainer.resume_mode={mode!r} is unknown; allowed: auto, disable, resume_path")
    root = Path(config.default_local_dir)
    step = _same_on_all_ranks(root, roles)
    return None if step == NOTHING else step_folder(root, step)


def verify_checkpoint(folder: Path, roles: Sequence[str]) -> None:
    """Refuses a checkpoint of which anything is missing or damaged, by the name of the file."""
    read_state(folder)
    for role in roles:
        verify_folder(folder / role)


def _same_on_all_ranks(root: Path, roles: Sequence[str]) -> int:
    """`_newest_good`, found by the first rank."""
    if not dist.is_initialized():
        return _newest_good(root, roles)
    found = torch.tensor(FAILED)
    try:
        if leads():
            found.fill_(_newest_good(root, roles))
    finally:
        dist.broadcast(found, src=0)
    if int(found) == FAILED:
        raise CheckpointError(f"the first rank found no checkpoint to resume from in {root}; see its error")
    return int(found)


def _newest_good(root: Path, roles: Sequence[str]) -> int:
    """The newest step whose files are whole, not after the one named by the marker file; NOTHING without any."""
    remove_leftovers(root)
    steps = complete_steps(root)
    latest = root / LATEST
    if latest.is_file():
        text = latest.read_text().strip()
        if not text.isdigit():
            raise CheckpointError(f"{latest} holds {text!r}, expected a step number; correct or delete the file")
        if int(text) not in steps:
            logger.warning(
                "%s names step %s, but %s is no complete checkpoint", latest, text, step_folder(root, int(text))
            )
        steps = [step for step in steps if step <= int(text)]
    first_error: DamagedCheckpoint | None = None
    for step in reversed(steps):
        try:
            verify_checkpoint(step_folder(root, step), roles)
        except DamagedCheckpoint as error:
            logger.warning("not resuming from step %d: %s", step, error)
            first_error = first_error or error
        else:
            return step
    if first_error is not None or latest.is_file():
        raise CheckpointError(
            f"{root} holds no checkpoint that is whole ({first_error or 'none is complete'}); restore one, or start "
            "over with trainer.resume_mode=disable"
        )
    return NOTHING


def _explicit(path: str | None) -> Path:
    if not path or "global_step_" not in Path(path).name:
        raise ConfigError(
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path=<…/global_step_N>, got {path!r}"
        )
    folder = Path(path)
    if not (folder / STATE).is_file():
        raise CheckpointError(f"trainer.resume_from_path={path} is no complete checkpoint: {folder / STATE} is missing")
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer's part of a checkpoint."""
    path = folder / STATE
    try:
        return read_sealed(path)
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{path} is damaged: {error}; use another checkpoint") from error
