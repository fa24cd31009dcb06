"""Names of the files in a run's folder. Importing this loads no heavy library."""

import re
from pathlib import Path

from verl.utils.errors import CheckpointError

LATEST_STEP_FILE = "latest_checkpointed_iteration.txt"
TRAINER_STATE_FILE = "trainer.json"
LEDGER = "ledger"  # folder
_STEP = re.compile(r"global_step_(0|[1-9][0-9]*)")


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"global_step_{step}"


def complete_steps(root: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending. Unfinished folders have other names; other files do not matter."""
    if not Path(root).is_dir():
        return []
    steps = (_STEP.fullmatch(child.name) for child in Path(root).iterdir())
    numbers = sorted(int(match.group(1)) for match in steps if match)
    return [step for step in numbers if (step_folder(root, step) / TRAINER_STATE_FILE).is_file()]


def read_marker(root: Path) -> int | None:
    """The step number in LATEST_STEP_FILE, None without the file; CheckpointError where it holds none."""
    path = Path(root) / LATEST_STEP_FILE
    try:
        text = path.read_text("utf-8").strip()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); write a step number into it, or delete it") from error
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise CheckpointError(f"{path} holds {text[:40]!r}, expected a step number; correct or delete the file")
    return int(text)
