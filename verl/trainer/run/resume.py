"""Finds the checkpoint to resume from: the newest intact one, or the one that is configured."""

import logging
from collections.abc import Sequence
from pathlib import Path

from verl.config.trainer import SFTTrainerConfig, TrainerConfig
from verl.trainer.run.checkpoints import (
    LATEST_STEP_FILE,
    TRAINER_STATE_FILE,
    check_role_manifest,
    complete_steps,
    read_state,
    step_folder,
)
from verl.trainer.run.files import read_marker
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import remove_leftovers
from verl.workers.engine.manifest import DamagedCheckpointError, verify_folder

logger = logging.getLogger(__name__)

NO_CHECKPOINT = -1  # returned instead of a step


def find_resume(config: TrainerConfig | SFTTrainerConfig, roles: Sequence[str]) -> Path | None:
    """The checkpoint folder to continue from, or None to start afresh (`trainer.resume_mode`).

    All files of `roles` (sub-folders; "." is the folder itself) that a resumed run reads are compared with their
    digests. `auto` skips damaged checkpoints with a warning; `resume_path` refuses one.
    """
    mode = config.resume_mode
    if mode == "disable":
        return None
    if mode == "resume_path":
        folder = _requested_folder(config.resume_from_path)
        verify_checkpoint(folder, roles)
        return folder
    if mode != "auto":
        raise ConfigError(f"trainer.resume_mode={mode!r} is unknown; allowed: auto, disable, resume_path")
    root = Path(config.default_local_dir)
    step = _newest_intact_step(root, roles)
    return None if step == NO_CHECKPOINT else step_folder(root, step)


def verify_checkpoint(folder: Path, roles: Sequence[str]) -> None:
    """CheckpointError naming the file if one that a run reads is missing, damaged or of another checkpoint.

    Damage to files that other programs read is a warning.
    """
    state = read_state(folder)
    for role in roles:
        check_role_manifest(folder, state, role)
        for damage in verify_folder(folder / role):
            logger.warning(
                "%s; the run does not need it and goes on, but load no model from there: `verl merge --local_dir %s` "
                "makes one from the shards",
                damage,
                folder / role,
            )


def _newest_intact_step(root: Path, roles: Sequence[str]) -> int:
    """The newest intact step, at most the one in LATEST_STEP_FILE; NO_CHECKPOINT without any checkpoint.

    What a killed save has left in `root` is deleted.
    """
    remove_leftovers(root, ("global_step_", LATEST_STEP_FILE))
    steps = complete_steps(root)
    latest = root / LATEST_STEP_FILE
    if (marked := read_marker(root)) is not None:
        if marked not in steps:
            logger.warning(
                "%s names step %d, but %s is no complete checkpoint", latest, marked, step_folder(root, marked)
            )
        if later := [step for step in steps if step > marked]:
            logger.warning("%s names step %d: passing over the checkpoints of steps %s", latest, marked, later)
        steps = [step for step in steps if step <= marked]
    first_error: DamagedCheckpointError | None = None
    for step in reversed(steps):
        try:
            verify_checkpoint(step_folder(root, step), roles)
        except DamagedCheckpointError as error:
            logger.warning("not resuming from step %d: %s", step, error)
            first_error = first_error or error
        else:
            return step
    if first_error is not None or marked is not None:
        raise CheckpointError(
            f"{root} holds no checkpoint that is whole ({first_error or 'none is complete'}); restore one, or start "
            "over under another trainer.experiment_name"
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
