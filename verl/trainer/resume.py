"""Checkpoints of a run on disk: written whole or not at all, kept by number, found again.

<root>/global_step_N/{actor,critic}/…    engine checkpoints
<root>/global_step_N/trainer.json        step, data order, controller state; digest of the configuration
<root>/latest_checkpointed_iteration.txt  N of the newest complete one
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl.config.trainer import SFTTrainerConfig, TrainerConfig
from verl.utils.errors import CheckpointError, ConfigError
from verl.utils.paths import atomic_directory, atomic_write_text, remove_leftovers

LATEST = "latest_checkpointed_iteration.txt"
STATE = "trainer.json"
_STEP = re.compile(r"^global_step_(\d+)$")


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"global_step_{step}"


def save_checkpoint(root: Path, step: int, state: dict[str, Any], roles: dict[str, Callable[[Path], None]]) -> Path:
    """Write `global_step_<step>`: each role fills its own sub-folder, then `latest…txt` names the step.

    A process killed at any moment leaves the previous checkpoint in force.
    """
    target = step_folder(root, step)
    with atomic_directory(target) as folder:
        for role, save in roles.items():
            (folder / role).mkdir(exist_ok=True)  # "." is the folder itself
            save(folder / role)
        (folder / STATE).write_text(json.dumps(state, indent=1, sort_keys=True))
    atomic_write_text(Path(root) / LATEST, str(step))
    return target


def prune(root: Path, keep: dict[str, int | None]) -> None:
    """Drop role folders beyond `keep[role]` newest checkpoints; a step without roles left is removed whole."""
    steps = sorted(complete_steps(root), reverse=True)
    for role, count in keep.items():
        if count is None or count < 1:
            continue
        for step in steps[count:]:
            shutil.rmtree(step_folder(root, step) / role, ignore_errors=True)
    for step in steps[1:]:
        folder = step_folder(root, step)
        if not any(child.is_dir() for child in folder.iterdir()):
            shutil.rmtree(folder)


def complete_steps(root: Path) -> list[int]:
    """Steps with a whole checkpoint folder, ascending. Unfinished ones have other names."""
    if not Path(root).is_dir():
        return []
    matches = (_STEP.match(child.name) for child in Path(root).iterdir() if (child / STATE).is_file())
    return sorted(int(match.group(1)) for match in matches if match)


def find_resume(config: TrainerConfig | SFTTrainerConfig) -> Path | None:
    """The checkpoint folder to continue from, or None to start afresh (`trainer.resume_mode`)."""
    root = Path(config.default_local_dir)
    if config.resume_mode == "disable":
        return None
    if config.resume_mode == "resume_path":
        return _explicit(config.resume_from_path)
    if config.resume_mode != "auto":
        raise ConfigError(f"trainer.resume_mode={config.resume_mode!r} is unknown; allowed: auto, disable, resume_path")
    remove_leftovers(root)
    latest = root / LATEST
    if not latest.is_file():
        steps = complete_steps(root)
        return step_folder(root, steps[-1]) if steps else None
    text = latest.read_text().strip()
    if not text.isdigit():
        raise CheckpointError(f"{latest} holds {text!r}, expected a step number; correct or delete the file")
    folder = step_folder(root, int(text))
    if not (folder / STATE).is_file():
        known = ", ".join(map(str, complete_steps(root))) or "none"
        raise CheckpointError(
            f"{latest} names step {text}, but {folder} is no complete checkpoint (complete: {known}); write one "
            f"of them into the file, or start over with trainer.resume_mode=disable"
        )
    return folder


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
    return json.loads((folder / STATE).read_text())
