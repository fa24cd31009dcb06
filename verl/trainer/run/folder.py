"""Takes the folder of a run: a new one, or its own again, so that no run overwrites another (`trainer.on_existing`)."""

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from verl.config import RunConfig, SFTConfig
from verl.config.run_name import C, has_dated_name, has_own_folder, with_trainer_values
from verl.config.special_files import refuse_special
from verl.observe.events import EVENTS_FILE
from verl.observe.run_changes import change_lines, find_changes, results_change
from verl.observe.run_record import RUN_FILE, VALIDATION_SAMPLES, RunRecord, read_record
from verl.observe.trackers import metrics_path, parse_metrics
from verl.trainer.run.files import LATEST_STEP_FILE, LEDGER, complete_steps
from verl.utils.errors import ConfigError, DataError
from verl.utils.folder_lock import FolderInUseError, one_run_in
from verl.utils.process_end import set_resume_point

AnyConfig = RunConfig | SFTConfig
_DUMPS = ("rollout_data_dir", "validation_data_dir")
_SILENT = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.on_existing")  # they say how to go on
_NUM_SHOWN, _NUM_LOOKED_AT = 6, 50  # keys in an error; earlier runs that may be continued


@dataclass(frozen=True)
class RunPlace:
    """Where a run goes, and what its header says about that: `state` in its first line, `lines` below."""

    state: str = "new"
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Holdings:
    """The steps that the places of a run hold already; 0 stands for no step."""

    record: RunRecord | None
    checkpoint: int
    logged: int
    in_ledger: bool
    damage: str = ""  # why there is no record, where there is a file

    @property
    def has_steps(self) -> bool:
        return bool(self.checkpoint or self.logged or self.in_ledger)


@contextlib.contextmanager
def claimed_run(config: C) -> Iterator[tuple[C, RunPlace]]:
    """The configuration with the name and folders that the run takes, while the folder is locked.

    ConfigError where the run would overwrite another; FolderInUseError where another runs there.
    """
    named, place = settle_name(config)
    with ExitStack() as cleanup, ExitStack() as stack:  # the lock is given back before an empty folder is removed
        taken, held = _lock_first_fit(named, stack)
        cleanup.callback(_remove_if_empty, Path(taken.trainer.default_local_dir))
        if taken.trainer.experiment_name != named.trainer.experiment_name and not has_dated_name(named):
            place = RunPlace(f"new; {named.trainer.experiment_name} holds another run")
        set_resume_point(Path(taken.trainer.default_local_dir) / LATEST_STEP_FILE, taken.trainer.experiment_name)
        yield taken, _set_aside_and_describe(taken, held, place)


def settle_name(config: C) -> tuple[C, RunPlace]:
    """A dated name replaced by that of the run in the folder that is configured, or of the run to go on with."""
    if not has_dated_name(config):
        return config, RunPlace()
    if has_own_folder(config):
        record = _record_in(Path(config.trainer.default_local_dir))
        saved = record.config.get("trainer", {}).get("experiment_name") if record else None
        values = {"experiment_name": saved} if saved else _first_free_metrics(config)
        return with_trainer_values(config, values), RunPlace()
    earlier = find_earlier_run(config)
    if earlier is None or earlier.folder is None:
        return config, RunPlace()
    name = str(earlier.config["trainer"]["experiment_name"])
    if config.trainer.on_existing == "resume":
        values = {"experiment_name": name, "default_local_dir": str(earlier.folder)}
        return with_trainer_values(config, values), RunPlace()
    done = f"{complete_steps(earlier.folder)[-1]} of {earlier.total_steps}"
    state = f"new; to continue the last one (step {done}), add trainer.experiment_name={name}"
    return config, RunPlace(state)


def find_earlier_run(config: AnyConfig) -> RunRecord | None:
    """The newest run beside this one that has the same configuration and a checkpoint."""
    root = Path(config.trainer.default_local_dir).parent
    there = (file for file in root.glob(f"*/{RUN_FILE}") if file.is_file())
    files = sorted(there, key=lambda path: path.stat().st_mtime, reverse=True)
    for file in files[:_NUM_LOOKED_AT]:
        record = _record_in(file.parent)
        if record is None or record.config.get("trainer", {}).get("experiment_name") != file.parent.name:
            continue  # its name alone would not lead to it
        if complete_steps(file.parent) and not results_change(find_changes(record.config, config)):
            return record
    return None


def holdings_of(config: AnyConfig) -> Holdings:
    """Reads what the folder and the metrics file of a run hold."""
    root, metrics = Path(config.trainer.default_local_dir), metrics_of(config)
    logged = [record["step"] for record in parse_metrics(metrics).records] if metrics and metrics.is_file() else []
    in_ledger = any((root / LEDGER).glob("step_*.parquet"))
    record, damage = _record_and_damage(root)
    return Holdings(record, max(complete_steps(root), default=0), max(logged, default=0), in_ledger, damage)


def metrics_of(config: AnyConfig) -> Path | None:
    """The metrics file of a run; None where the tracker `file` is not among trainer.logger."""
    settings = config.trainer
    return metrics_path(settings.project_name, settings.experiment_name) if "file" in settings.logger else None


def _record_in(folder: Path) -> RunRecord | None:
    return _record_and_damage(folder)[0]


def _record_and_damage(folder: Path) -> tuple[RunRecord | None, str]:
    """Without a record that can be read the steps decide, as for runs of versions without this file."""
    try:
        return read_record(folder) if (folder / RUN_FILE).exists() else None, ""
    except DataError as error:
        return None, str(error)


def _candidates(config: C) -> Iterator[C]:
    if has_dated_name(config):
        yield from (_numbered(config, number) for number in itertools.count(1))
    yield config
    if config.trainer.on_existing == "rename":
        yield from (_numbered(config, number) for number in itertools.count(2))


def _numbered(config: C, number: int) -> C:
    settings = config.trainer
    return with_trainer_values(
        config,
        {
            "experiment_name": f"{settings.experiment_name}-{number}",
            "default_local_dir": f"{settings.default_local_dir}-{number}",
        },
    )


def _first_free_metrics(config: C) -> dict[str, str]:
    """A name whose metrics file does not exist, for a run in a folder of its own."""
    for number in itertools.count(1):
        candidate = _numbered(config, number)
        path = metrics_of(candidate)
        if path is None or not path.exists() or "VERL_FILE_LOGGER_PATH" in os.environ:
            break
    return {"experiment_name": candidate.trainer.experiment_name}


def _lock_first_fit(config: C, stack: ExitStack) -> tuple[C, Holdings]:
    """Lock the first candidate that the run may write to."""
    policy = config.trainer.on_existing
    for candidate in _candidates(config):
        is_new, lock = candidate is not config, ExitStack()
        if is_new and _is_taken(candidate):
            continue
        for place in (root := Path(candidate.trainer.default_local_dir), root / LEDGER, metrics_of(candidate)):
            if place is not None:
                refuse_special(place, "records of the run")
        try:
            lock.enter_context(one_run_in(candidate.trainer.default_local_dir, "trainer.default_local_dir"))
        except FolderInUseError:
            if is_new:
                continue
            raise
        with lock:
            if is_new and _is_taken(candidate):  # meanwhile
                continue
            held = holdings_of(candidate)
            conflict = find_conflict(candidate, held)
            if conflict and not (conflict.may_resume and policy == "resume"):
                if policy == "rename" and not is_new:
                    continue
                raise ConfigError(f"{conflict.reason}. {_ways_out(candidate, conflict.may_resume)}")
            stack.push(lock.pop_all())
            return _with_free_dumps(candidate) if not held.has_steps else candidate, held
    raise AssertionError("there are endless candidates")


def _is_taken(config: AnyConfig) -> bool:
    """Whether a run was ever begun under this name."""
    metrics = metrics_of(config)
    used = metrics is not None and metrics.exists() and "VERL_FILE_LOGGER_PATH" not in os.environ
    root = Path(config.trainer.default_local_dir)
    return used or (root / RUN_FILE).exists() or bool(complete_steps(root))


class Conflict(NamedTuple):
    reason: str  # why the run must not write there
    may_resume: bool  # whether it could go on with those steps instead


def find_conflict(config: AnyConfig, held: Holdings) -> Conflict | None:
    """The reason why the run may not write to its places, given what they hold; None where it may."""
    settings, metrics = config.trainer, metrics_of(config)
    validates_only = settings.get("val_only", False)
    root, steps = Path(settings.default_local_dir), f"steps up to {max(held.checkpoint, held.logged) or 'unknown'}"
    if not held.has_steps:
        return None
    if held.record is None and not held.checkpoint:
        return Conflict(
            f"{metrics if held.logged else root} already holds {steps} of a run that is not in {root}", False
        )
    if held.record and (changes := results_change(find_changes(held.record.config, config))):
        shown = ", ".join(map(str, changes[:_NUM_SHOWN])) + (", ..." if len(changes) > _NUM_SHOWN else "")
        return Conflict(f"{root} already holds {steps} of another configuration ({shown})", held.checkpoint > 0)
    theirs = held.record.metrics if held.record else None
    if held.logged and metrics and theirs and theirs.is_file() and not theirs.samefile(metrics):
        return Conflict(f"{metrics} already holds {steps} of another run: {root} logs to {theirs}", False)
    if settings.resume_mode == "disable" and not validates_only:
        return Conflict(f"{root} already holds {steps}, which trainer.resume_mode=disable would overwrite", False)
    start = _start(config)
    if start and start.parent.absolute() != root.absolute():
        return Conflict(f"{root} already holds {steps}, which those after {start} would overwrite", False)
    return None


def _ways_out(config: AnyConfig, may_resume: bool) -> str:
    if "VERL_FILE_LOGGER_PATH" in os.environ and metrics_of(config):
        return "Nothing was changed. Name another file in VERL_FILE_LOGGER_PATH, or unset it, and another run"
    keys = "trainer.experiment_name=NAME" + (" trainer.default_local_dir=DIR" if has_own_folder(config) else "")
    other = f"start under another name ({keys}, or trainer.on_existing=rename for the next free one)"
    resume = ", or go on with those steps (trainer.on_existing=resume)" if may_resume else ""
    return f"Nothing was changed. To go ahead, {other}{resume}"


def _with_free_dumps(config: C) -> C:
    """The same run, with its dumps beside those of an earlier run instead of over them."""
    values = {}
    for name in _DUMPS:
        folder = config.trainer.get(name)
        if folder and any(Path(folder).glob("[0-9]*.jsonl")):
            free = (f"{folder}-{number}" for number in itertools.count(2))
            values[name] = next(path for path in free if not Path(path).exists())
    return with_trainer_values(config, values) if values else config


def _set_aside_and_describe(config: AnyConfig, held: Holdings, place: RunPlace) -> RunPlace:
    """Sets aside the records of a run that must start over; returns the header's line."""
    if not held.has_steps:
        _set_aside([Path(config.trainer.default_local_dir) / EVENTS_FILE])  # of a process that ended in its first step
        return place
    if config.trainer.get("val_only", False):
        return RunPlace("validation alone")
    changes = find_changes(held.record.config, config) if held.record else []
    lines = change_lines(change for change in changes if change.key not in _SILENT)
    if held.record is None:
        damage = held.damage or f"an earlier version saved it without {RUN_FILE}"
        lines = [f"{damage}: its configuration is not compared"]
    if start := _start(config):
        return RunPlace(f"continues from {start}", tuple(lines))
    if held.checkpoint:
        return RunPlace(f"continues after step {held.checkpoint}", tuple(lines))
    kept = set_aside_records(config)
    return RunPlace("starts over, as it had saved nothing", (f"its earlier records are kept: {kept}",))


def set_aside_records(config: AnyConfig) -> str:
    """Rename what an earlier start of this run has logged and recorded; returns the new names."""
    root, metrics = Path(config.trainer.default_local_dir), metrics_of(config)
    folders = [root / LEDGER, root / VALIDATION_SAMPLES, root / EVENTS_FILE]
    folders += [Path(str(folder)) for name in _DUMPS if (folder := config.trainer.get(name))]
    return ", ".join(_set_aside([*([metrics] if metrics else []), *folders]))


def _set_aside(paths: Iterable[Path]) -> list[str]:
    """Rename files, and folders that hold something, where they exist; returns the new names."""
    kept = []
    for path in paths:
        if path.exists() and (path.is_file() or any(path.iterdir())):
            names = (path.with_name(f"{path.stem}.earlier-{number}{path.suffix}") for number in itertools.count(1))
            target = next(name for name in names if not name.exists())
            path.rename(target)
            kept.append(str(target))
    return kept


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _start(config: AnyConfig) -> Path | None:
    """The checkpoint that the configuration names to start from; None where the newest one is looked for."""
    settings = config.trainer
    named = settings.resume_mode == "resume_path" or (isinstance(config, SFTConfig) and settings.resume_mode == "auto")
    return Path(settings.resume_from_path) if named and settings.resume_from_path else None
