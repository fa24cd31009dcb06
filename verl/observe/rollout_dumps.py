"""Human-readable rollouts: one JSON line each, in `<folder>/<step>.jsonl`."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl.utils.errors import DataError
from verl.utils.paths import atomic_write_text


def dump_rollouts(
    folder: Path | str,
    step: int,
    inputs: Sequence[str],
    outputs: Sequence[str],
    ground_truths: Sequence[Any],
    scores: Sequence[float | None],
    extras: Mapping[str, Sequence[Any]] | None = None,
) -> Path:
    """Write `<folder>/<step>.jsonl` with input, output, gts, score, step and the extras; replaces an older file.

    `extras` maps a field name to one value per rollout; values that JSON cannot represent are written as strings.
    """
    columns = dict[str, Sequence[Any]](extras or {}, input=inputs, output=outputs, gts=ground_truths, score=scores)
    for name, column in columns.items():
        if len(column) != len(inputs):
            raise DataError(f"dump of step {step}: {name!r} has {len(column)} values for {len(inputs)} rollouts")
    order = ["input", "output", "gts", "score", "step", *(extras or {})]
    lines = []
    for i in range(len(inputs)):
        row = {name: column[i] for name, column in columns.items()} | {"step": step}
        ordered = {name: row[name] for name in dict.fromkeys(order)}
        lines.append(json.dumps(ordered, ensure_ascii=False, default=json_default))
    path = Path(folder) / f"{step}.jsonl"
    try:
        atomic_write_text(path, "".join(line + "\n" for line in lines))
    except OSError as error:
        raise DataError(
            f"the answers of step {step} could not be written to {path}: {error}. Make room or make the folder "
            "writable, then run the same command under its name, which goes on from the last checkpoint"
        ) from error
    return path


def remove_dumps_after(folder: Path | str, step: int) -> None:
    """Delete the dumps of later steps, for a run that resumes after `step`."""
    for path in Path(folder).glob("*.jsonl"):
        if re.fullmatch(r"[0-9]+", path.stem) and int(path.stem) > step:
            path.unlink()


def json_default(value: Any) -> Any:
    """Scalars and arrays of numpy or torch as numbers and lists, anything else as a string."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
