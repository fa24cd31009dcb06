"""Records of steps in a run's folder beside the metrics: profiles and the counts of each rollout replica."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.paths import atomic_write_text

logger = logging.getLogger(__name__)

PROFILES_FILE = "profiles.jsonl"  # {"name": "step_5", "files": [...]}
REPLICAS_FILE = "replicas.jsonl"  # {"step": 5, "lost": 0, "replicas": [{"counts", "gauges", "decode_times": {...}}]}
ReplicaPoints = dict[str, dict[int, list[tuple[float, float]]]]  # name -> replica -> (step, value)


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line; a file that cannot be written is said and does not end the training."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written (%s): the report will lack it", path, error)


def note_profile(folder: Path) -> Callable[[str, list[str]], None]:
    """Returns a function that notes the files of a profile in the run's folder."""
    return lambda name, files: append_record(folder / PROFILES_FILE, {"name": name, "files": files})


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of such a file, in order; none without it. What a killed process left incomplete is left out, and other
    lines that are no records are said."""
    found, wrong, step_of = [], [], STEP_OF[path.name]
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step_of(record)
            found.append(record)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            wrong += [number] if number < len(lines) else []  # the last one has no end
    if wrong:
        logger.warning(
            "%s: %d lines are no records, the first is line %d; they are left out", path, len(wrong), wrong[0]
        )
    return found


def drop_records_after(folder: Path, step: int) -> None:
    """Forget what steps after `step` have left, for a run that goes on there, and a line that has no end."""
    for name, step_of in STEP_OF.items():
        path = folder / name
        if path.is_file():
            kept = [record for record in read_records(path) if step_of(record) <= step]
            atomic_write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        elif path.is_dir():
            logger.warning("%s is a folder: the report will lack what belongs there; move it away", path)


def last_profiled_step(record: Mapping[str, Any]) -> int:
    """10 of `steps_5_10`."""
    return int(str(record["name"]).rpartition("_")[2])


STEP_OF: dict[str, Callable[[Mapping[str, Any]], int]] = {
    REPLICAS_FILE: lambda record: int(record["step"]), PROFILES_FILE: last_profiled_step,
}  # fmt: skip


def latest_by_step(records: Sequence[Mapping[str, Any]], last_step: int) -> list[Mapping[str, Any]]:
    """One record a step, the newest where a resume ran it again, up to `last_step`."""
    by_step = {int(record["step"]): record for record in records}
    return [by_step[step] for step in sorted(by_step) if step <= last_step]


def replica_points(records: Sequence[Mapping[str, Any]]) -> ReplicaPoints:
    """Each replica's counts in each step and its state at the end of it; a count that fell was begun anew."""
    points: ReplicaPoints = {}
    before: dict[tuple[int, str], float] = {}
    for record in records:
        for number, replica in enumerate(record["replicas"]):
            for name, count in replica["counts"].items():
                was = before.get((number, name), 0.0)
                before[number, name] = count
                done = count - was if count >= was else count
                points.setdefault(name, {}).setdefault(number, []).append((float(record["step"]), done))
            for name, value in replica["gauges"].items():
                points.setdefault(name, {}).setdefault(number, []).append((float(record["step"]), value))
    return points
