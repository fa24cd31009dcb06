"""One small class per tracker. Each imports its own library only if a run uses that tracker."""

import contextlib
import html
import json
import logging
import math
import os
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from verl.config.special_files import refuse_special
from verl.observe.metric_names import HEADLINES
from verl.utils.paths import atomic_write_bytes

logger = logging.getLogger(__name__)

# what MLflow accepts: metrics in one call, parameters in one call, characters of a parameter's name and of its value
_MLFLOW_BATCH, _MLFLOW_PARAMS, _MLFLOW_NAME, _MLFLOW_VALUE = 1000, 100, 250, 6000
_MLFLOW_TABLE = "val_generations.json"
SAMPLE_TABLE, SAMPLE_COLUMNS = "val/generations", ("prompt", "expected", "answer", "reward")
Sample = tuple[str, str, str, float | None]  # one value per column of SAMPLE_COLUMNS; reward None: not scored


@dataclass(frozen=True)
class RunInfo:
    """Name and config of the run, for trackers."""

    project: str
    experiment: str
    config: dict[str, Any] = field(default_factory=dict)


class ConsoleBackend:
    """One compact line per step on standard output: the headline metrics, then the number of the others."""

    def __init__(self, run: RunInfo, stream: TextIO | None = None):
        self.stream = stream

    def log(self, data: dict[str, float], step: int) -> None:
        parts = [f"{label}:{format_number(data[name])}" for name, label in self._headline_metrics(data)]
        hidden = len(data) - len(parts)
        if not parts:
            parts, hidden = [f"{name}:{format_number(value)}" for name, value in data.items()], 0
        more = f" (+{hidden} more)" if hidden else ""
        print(f"step:{step} " + " ".join(parts) + more, file=self.stream or sys.stdout, flush=True)

    def _headline_metrics(self, data: dict[str, float]) -> list[tuple[str, str]]:
        chosen: list[tuple[str, str]] = []
        for key, (label, _) in HEADLINES.items():
            if key.endswith("/"):
                chosen += [(name, name) for name in sorted(data) if name.startswith(key)]
            elif label and key in data:
                chosen.append((key, label))
        return chosen

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Does nothing: the run prints them."""

    def rewind(self, step: int) -> None:
        """Does nothing: printed lines stay."""

    def finish(self, exit_code: int) -> None:
        """Does nothing."""


class FileBackend:
    """JSON lines `{"step": 3, "data": {...}}`, each on the disk when logged. A killed run leaves whole lines.

    What is logged for a step that has a line already is merged into that line.
    """

    def __init__(self, run: RunInfo, path: Path | None = None):
        self.path = refuse_special(path or metrics_path(run.project, run.experiment), "the metrics file")
        self._fd = -1
        self._open()

    def _open(self) -> None:
        """Open the file, which goes on after its last whole line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._truncate_partial_line()
        self._steps = {r["step"] for r in parse_metrics(self.path).records} if self.path.exists() else set()
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._fd).st_size

    def _begin_again_if_changed(self) -> None:
        """Go on with the file that is there now, where somebody removed, replaced or cut ours: said in one line."""
        with contextlib.suppress(OSError):
            there = os.stat(self.path)
            if os.path.samestat(there, os.fstat(self._fd)) and there.st_size >= self._size:
                return
        logger.warning("%s was removed or cut while the run writes it: its earlier lines are lost", self.path)
        self._open()

    def log(self, data: dict[str, float], step: int) -> None:
        self._begin_again_if_changed()
        if step in self._steps:
            same = lambda record: {**record, "data": {**record["data"], **data}}  # noqa: E731
            self._rewrite([same(r) if r["step"] == step else r for r in read_metrics(self.path)])
            return
        self._steps.add(step)
        line = json_line({"step": step, "data": data})
        written = os.write(self._fd, line)
        if written != len(line):
            raise OSError(f"{self.path}: wrote {written} of {len(line)} bytes; is the disk full?")
        os.fsync(self._fd)
        self._size = os.fstat(self._fd).st_size

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Does nothing: the file holds numbers; a run has validation_samples/ and trainer.validation_data_dir."""

    def rewind(self, step: int) -> None:
        """Drop the lines of steps after `step`, so that a resumed run writes each step once; say which it lacks."""
        self._begin_again_if_changed()
        if lost := [number for number in range(1, step + 1) if number not in self._steps]:
            logger.warning(
                "%s has no line of %d of the %d steps before this start, first step %d: it was cut, emptied or removed",
                self.path, len(lost), step, lost[0],
            )  # fmt: skip
        records, unreadable = read_metrics(self.path), parse_metrics(self.path).unreadable_lines
        if unreadable or any(record["step"] > step for record in records):
            self._rewrite([record for record in records if record["step"] <= step])

    def _rewrite(self, records: list[dict[str, Any]]) -> None:
        """Replace the file; one with lines that are no records is kept under another name."""
        if parse_metrics(self.path).unreadable_lines:
            atomic_write_bytes(self.path.with_name(f"{self.path.name}.unreadable"), self.path.read_bytes())
        atomic_write_bytes(self.path, b"".join(json_line(record) for record in records))
        self._open()

    def finish(self, exit_code: int) -> None:
        os.close(self._fd)

    def _truncate_partial_line(self) -> None:
        """Cut off an unfinished last line, so that the next record starts a new line."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)


class TensorboardBackend:
    """Event files under $TENSORBOARD_DIR, else tensorboard_log/<project>/<experiment>."""

    def __init__(self, run: RunInfo):
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class = SummaryWriter
        self.folder = os.environ.get("TENSORBOARD_DIR") or os.path.join("tensorboard_log", run.project, run.experiment)
        self._writer = SummaryWriter(self.folder)

    def log(self, data: dict[str, float], step: int) -> None:
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._writer.add_text(SAMPLE_TABLE, markdown_table(SAMPLE_COLUMNS, samples), step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        """Make tensorboard discard the events after `step`."""
        self._writer.close()
        self._writer = self._writer_class(self.folder, purge_step=step + 1)

    def finish(self, exit_code: int) -> None:
        self._writer.close()


class WandbBackend:
    """Weights & Biases; WANDB_MODE=offline needs neither network nor account."""

    def __init__(self, run: RunInfo):
        import wandb

        self._wandb, self._info = wandb, run
        self._run = self._start()

    def _start(self, **extra: Any) -> Any:
        return self._wandb.init(
            project=self._info.project,
            name=self._info.experiment,
            config=self._info.config,
            entity=os.environ.get("WANDB_ENTITY"),
            settings=self._wandb.Settings(console="off", silent=True),
            **extra,
        )

    def log(self, data: dict[str, float], step: int) -> None:
        self._run.log(data, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = [[step, *sample] for sample in samples]
        self._run.log({SAMPLE_TABLE: self._wandb.Table(columns=["step", *SAMPLE_COLUMNS], data=rows)}, step=step)

    def rewind(self, step: int) -> None:
        """A run continued by $WANDB_RUN_ID rejects values for steps it has, so a new run continues after `step`."""
        old = self._run
        if old.step > step + 1:
            old.finish()
            self._run = self._start(id=uuid.uuid4().hex[:8], resume="never", notes=f"continues {old.id} at step {step}")

    def finish(self, exit_code: int) -> None:
        self._run.finish(exit_code=exit_code)


class MlflowBackend:
    """MLflow at $MLFLOW_TRACKING_URI, else a local SQLite file ./mlruns/mlflow.db; $MLFLOW_RUN_ID continues a run."""

    def __init__(self, run: RunInfo):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            folder = Path("mlruns").absolute()
            folder.mkdir(exist_ok=True)
            uri = f"sqlite:///{folder}/mlflow.db"
        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment(run.project)
        self._mlflow, self._info = mlflow, run
        started = mlflow.start_run(run_id=os.environ.get("MLFLOW_RUN_ID"), run_name=run.experiment)
        self._run_id = started.info.run_id
        self._log_config(run.config)

    def _log_config(self, config: dict[str, Any]) -> None:
        """Logs the config as one JSON artefact, and each key as a parameter, to compare runs by.

        A parameter is written once: a continued run keeps those it has. Long values are cut; the artefact is whole.
        """
        if not config:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(config, indent=1, default=str))
            self._mlflow.log_artifact(str(path))
        client = self._mlflow.MlflowClient()
        known = client.get_run(self._run_id).data.params
        values = {mlflow_name(name)[:_MLFLOW_NAME]: value[:_MLFLOW_VALUE] for name, value in flattened(config).items()}
        new = [self._mlflow.entities.Param(name, value) for name, value in values.items() if name not in known]
        for start in range(0, len(new), _MLFLOW_PARAMS):
            client.log_batch(self._run_id, params=new[start : start + _MLFLOW_PARAMS])

    def log(self, data: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics({mlflow_name(name): float(value) for name, value in data.items()}, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._write_samples([*self._earlier_samples(self._run_id, step - 1), *([step, *sample] for sample in samples)])

    def _earlier_samples(self, run_id: str, step: int) -> list[list[Any]]:
        """Rows of a run's table up to `step`. Not by load_table, which turns an answer of digits into a number."""
        if all(file.path != _MLFLOW_TABLE for file in self._mlflow.MlflowClient().list_artifacts(run_id)):
            return []
        table = self._mlflow.artifacts.load_dict(f"runs:/{run_id}/{_MLFLOW_TABLE}")
        return [row for row in table["data"] if row[0] <= step]

    def _write_samples(self, rows: list[list[Any]]) -> None:
        self._mlflow.log_dict({"columns": ["step", *SAMPLE_COLUMNS], "data": rows}, _MLFLOW_TABLE, self._run_id)
        self._mlflow.set_tag("mlflow.loggedArtifacts", json.dumps([{"path": _MLFLOW_TABLE, "type": "table"}]))

    def rewind(self, step: int) -> None:
        """A run continued by $MLFLOW_RUN_ID keeps every value, so a new run gets copies of those up to `step`."""
        client, old = self._mlflow.MlflowClient(), self._run_id
        history = [v for name in client.get_run(old).data.metrics for v in client.get_metric_history(old, name)]
        if all(value.step <= step for value in history):
            return
        self._mlflow.end_run("KILLED")
        started = self._mlflow.start_run(run_name=self._info.experiment, tags={"continues": old})
        self._run_id = started.info.run_id
        self._log_config(self._info.config)
        earlier = [value for value in history if value.step <= step]
        for start in range(0, len(earlier), _MLFLOW_BATCH):
            client.log_batch(self._run_id, metrics=earlier[start : start + _MLFLOW_BATCH])
        if samples := self._earlier_samples(old, step):
            self._write_samples(samples)

    def finish(self, exit_code: int) -> None:
        self._mlflow.end_run(status="FINISHED" if exit_code == 0 else "FAILED")


def metrics_path(project: str, experiment: str) -> Path:
    """The file tracker's path: $VERL_FILE_LOGGER_PATH, or $VERL_FILE_LOGGER_ROOT/<project>/<experiment>.jsonl."""
    if path := os.environ.get("VERL_FILE_LOGGER_PATH"):
        return Path(path)
    return Path(os.environ.get("VERL_FILE_LOGGER_ROOT") or ".") / project / f"{experiment}.jsonl"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; without an unfinished last line (a killed run).

    Lines that are no records are passed over with a warning.
    """
    records, unreadable = parse_metrics(path)
    for number in unreadable:
        logger.warning("%s: line %d is no record of a step and is passed over", path, number)
    return records


class MetricsFile(NamedTuple):
    records: list[dict[str, Any]]
    unreadable_lines: list[int]  # numbers of the lines that are no records, from 1


def parse_metrics(path: Path) -> MetricsFile:
    """The lines of a metrics file, without a last one that has no end."""
    records, unreadable = [], []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
            data = {name: float(value) for name, value in record["data"].items()}
            records.append({**record, "step": int(record["step"]), "data": data})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            unreadable += [number] if line.strip() else []
    return MetricsFile(records, unreadable)


def json_line(record: dict[str, Any]) -> bytes:
    """One line of strict JSON: NaN and infinities become the strings "nan", "inf", "-inf"."""
    data = {name: value if math.isfinite(value) else str(value) for name, value in record["data"].items()}
    return (json.dumps({**record, "data": data}, allow_nan=False) + "\n").encode()


def mlflow_name(name: str) -> str:
    """MLflow allows letters, digits and _ - . space : / in a name; `@` becomes `_at_`, anything else `_`."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in name.replace("@", "_at_"))


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Leaves of nested dictionaries by dotted path, as text; lists as JSON."""
    out: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            out |= flattened(value, f"{prefix}{name}.")
        else:
            is_container = isinstance(value, Mapping | list | tuple)
            out[f"{prefix}{name}"] = json.dumps(value, default=str) if is_container else str(value)
    return out


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The rows as a table in Markdown; text in cells stays text."""

    def line(cells: Sequence[Any]) -> str:
        texts = (html.escape(str(cell)).replace("|", "&#124;").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


def format_number(value: float) -> str:
    """Four significant digits, integers whole."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return str(int(value))
    return f"{value:.4g}"
