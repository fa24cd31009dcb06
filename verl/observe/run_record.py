"""The record `run.json` of how a run was started, and how commands find a run by any of its names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.observe.run_changes import as_saved
from verl.observe.trackers import metrics_path
from verl.utils.checksummed import read_checksummed, write_checksummed
from verl.utils.errors import DataError
from verl.utils.paths import expand_home

RUN_FILE = "run.json"
VALIDATION_SAMPLES = "validation_samples"  # folder: answers to the first held-out prompts, <step>.jsonl
NUM_VALIDATION_SAMPLES = 8


@dataclass(frozen=True)
class RunRecord:
    """A run on disk. `folder` (checkpoints, ledger) is None for a metrics file alone; `total_steps` 0 is unknown."""

    name: str
    metrics: Path | None
    folder: Path | None = None
    total_steps: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)


def write_run_record(folder: Path, config: Any, total_steps: int) -> None:
    """Write `run.json` of a run: names, resolved configuration, and where its metrics go."""
    settings = config.trainer
    record = {
        "name": f"{settings.project_name}/{settings.experiment_name}",
        "metrics": None,
        "total_steps": total_steps,
        "config": as_saved(config),
    }
    if "file" in settings.logger:
        record["metrics"] = str(metrics_path(settings.project_name, settings.experiment_name).absolute())
    path = folder / RUN_FILE
    if path.is_dir() and not path.is_symlink():
        raise DataError(f"{path} is a folder, where the run's record belongs; move it away")
    write_checksummed(path, record, indent=1)


def find_run(text: str) -> RunRecord:
    """The run that `text` names: its folder, its metrics file, or <project>/<experiment>. DataError: none of them."""
    given = expand_home(text, "run")
    if given.is_file():
        return RunRecord(given.stem, given)
    for folder in (given, Path("checkpoints") / text):
        if (folder / RUN_FILE).is_file():
            return read_record(folder)
    metrics = Path(f"{text}.jsonl")
    if metrics.is_file():
        return RunRecord(text, metrics)
    raise DataError(
        f"{text!r} names no run: it is neither a folder with a {RUN_FILE} (trainer.default_local_dir of the run), nor "
        f"a metrics file (.jsonl), nor <project>/<experiment>, as neither checkpoints/{text}/{RUN_FILE} nor {metrics} "
        f"is below {Path.cwd()}"
    )


def read_record(folder: Path) -> RunRecord:
    path = folder / RUN_FILE
    try:
        data = read_checksummed(path, may_lack_digest=True)
        metrics = Path(data["metrics"]) if data["metrics"] else None
        config = {**data["config"], "trainer": {**data["config"].get("trainer", {})}}
        return RunRecord(str(data["name"]), metrics, folder, int(data["total_steps"]), config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(
            f"{path} is damaged, or no record of a run ({error!r:.200}); name the metrics file instead"
        ) from error
