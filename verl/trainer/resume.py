"""Where a run continues: the newest checkpoint that is whole, or the one that was asked for."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verl.config.trainer import SFTTrainerConfig, TrainerConfig
from verl.trainer.checkpoints import LATEST_STEP_FILE, TRAINER_STATE_FILE, complete_steps, is_rank_zero, step_folder
from verl.utils.checksummed import read_checksummed
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import remove_leftovers
from verl.workers.engine.manifest import DamagedCheckpointError, verify_folder

logger = logging.getLogger(__name__)

NO_CHECKPOINT, SEARCH_FAILED = -1, -2  # instead of a step


def find_resume(config: TrainerConfig | SFTTrainerConfig, roles: Sequence[str]) -> Path | None:
    """The checkpoint folder to continue from, or None to start afresh (`trainer.resume_mode`).

    All files of `roles` (sub-folders; "." is the folder itself) that a resumed run reads are compared with their
    digests. Among the newest, damaged ones are skipped with a warning; one that was asked for is refused.
    """
    mode = config.resume_mode
    if mode == "disable":
        return None
    if mode == "resume_path":
        folder = _requested_folder(config.resume_from_path)
        if is_rank_zero():
            verify_checkpoint(folder, roles)
        return folder
    if mode != "auto":
        raise ConfigError(f"trainer.resume_mode={mode!r} is unknown; allowed: auto, disable, resume_path")
    root = Path(config.default_local_dir)
    step = _newest_intact_step_on_all_ranks(root, roles)
    return None if step == NO_CHECKPOINT else step_folder(root, step)


def verify_checkpoint(folder: Path, roles: Sequence[str]) -> None:
    """Refuses a checkpoint of which anything is missing or damaged, by the name of the file."""
    read_state(folder)
    for role in roles:
        verify_folder(folder / role)


def _newest_intact_step_on_all_ranks(root: Path, roles: Sequence[str]) -> int:
    """`_newest_intact_step`, found by the first rank."""
    if not dist.is_initialized():
        return _newest_intact_step(root, roles)
    step = torch.tensor(SEARCH_FAILED)
    try:
        if is_rank_zero():
            step.fill_(_newest_intact_step(root, roles))
    finally:
        dist.broadcast(step, src=0)
    if int(step) == SEARCH_FAILED:
        raise CheckpointError(f"the first rank found no checkpoint to resume from in {root}; see its error")
    return int(step)


def _newest_intact_step(root: Path, roles: Sequence[str]) -> int:
    """The newest step whose files are whole, not after the one named by the marker file; NO_CHECKPOINT without any."""
    remove_leftovers(root)
    steps = complete_steps(root)
    latest = root / LATEST_STEP_FILE
    if latest.is_file():
        text = latest.read_text().strip()
        if not text.isdigit():
            raise CheckpointError(f"{latest} holds {text!r}, expected a step number; correct or delete the file")
        if int(text) not in steps:
            logger.warning(
                "%s names step %s, but %s is no complete checkpoint", latest, text, step_folder(root, int(text))
            )
        steps = [step for step in steps if step <= int(text)]
    first_error: DamagedCheckpointError | None = None
    for step in reversed(steps):
        try:
            verify_checkpoint(step_folder(root, step), roles)
        except DamagedCheckpointError as error:
            logger.warning("not resuming from step %d: %s", step, error)
            first_error = first_error or error
        else:
            return step
    if first_error is not None or latest.is_file():
        raise CheckpointError(
            f"{root} holds no checkpoint that is whole ({first_error or 'none is complete'}); restore one, or start "
            "over with trainer.resume_mode=disable"
        )
    return NO_CHECKPOINT


def _requested_folder(path: str | None) -> Path:
    if not path or "global_step_" not in Path(path).name:
        raise ConfigError(
            f"trainer.resume_mode=resume_path needs trainer.resume_from_path=<…/global_step_N>, got {path!r}"
        )
    folder = Path(path)
    if not (folder / TRAINER_STATE_FILE).is_file():
        raise CheckpointError(
            f"trainer.resume_from_path={path} is no complete checkpoint: {folder / TRAINER_STATE_FILE} is missing"
        )
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """The trainer's part of a checkpoint."""
    path = folder / TRAINER_STATE_FILE
    try:
        return read_checksummed(path)
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}; use another checkpoint") from error
