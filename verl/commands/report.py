"""`verl report RUN [RUN ...]`: one page about a run, or about several over each other, also while they train."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from verl.observe.alerts import alert_states, past_steps
from verl.observe.async_timeline import read_timeline
from verl.observe.html_report import AnswerHistory, Profile, RunData, write_page
from verl.observe.run_record import VALIDATION_SAMPLES, RunRecord, find_run
from verl.observe.step_records import PROFILES_FILE, REPLICAS_FILE, latest_by_step, read_records, replica_points
from verl.observe.trackers import format_number, read_metrics
from verl.trainer.ppo.health import HealthCheck
from verl.utils.errors import DataError, VerlError
from verl.utils.paths import expand_home
from verl.utils.process_end import say_error

SCORES = ("critic/score/mean", "train/loss")
EPILOG = """RUN is the folder of a run (trainer.default_local_dir), its metrics file, or <project>/<experiment>.

  verl report checkpoints/tutorial/mine                     writes checkpoints/tutorial/mine/report.html
  verl report tutorial/mine tutorial/other --out both.html  two runs over each other, with the keys that differ on top
  verl report tutorial/mine --follow                        writes the page again until the run has ended"""


def main(argv: Sequence[str] | None = None) -> int:
    """0: the page is written; 2: a mistake the message explains; 130: interrupted while following."""
    parser = argparse.ArgumentParser(
        prog="verl report", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run; several are drawn over each other")
    parser.add_argument("--out", type=Path, help="the page to write (default: report.html in the first run's folder)")
    parser.add_argument("--follow", action="store_true", help="write the page again until every run has ended")
    parser.add_argument("--every", type=int, default=10, metavar="S", help="seconds between two writes (default: 10)")
    options = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return report(options.runs, options.out, max(1, options.every) if options.follow else 0)
    except VerlError as error:
        say_error(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130


def report(names: Sequence[str], out: Path | None, refresh_s: int) -> int:
    """Write the page once, or every `refresh_s` seconds until all runs have done their last step."""
    records = [find_run(name) for name in names]
    path = expand_home(out, "--out") if out else default_path(records[0])
    while True:
        data = [read_run(record, path.parent, refresh_s > 0) for record in records]
        ended = all(last_step(run) >= record.total_steps for run, record in zip(data, records, strict=True))
        follow = refresh_s > 0 and not ended
        title, summary = " against ".join(run.name for run in data), summary_of_runs(data, records)
        write_page(path, title, data, (), summary, follow * refresh_s)
        print(f"{path}: {', '.join(f'{run.name} step {last_step(run)}' for run in data)}", flush=True)
        if not follow:
            return 0
        time.sleep(refresh_s)


def default_path(record: RunRecord) -> Path:
    """report.html in the run's folder; beside the metrics file where there is no folder."""
    if record.folder is not None:
        return record.folder / "report.html"
    assert record.metrics is not None
    return record.metrics.with_suffix(".report.html")


def read_run(record: RunRecord, page_folder: Path, is_followed: bool = False) -> RunData:
    """Reads what a run has on disk now; DataError where it keeps no metrics.

    Links to profiles start at `page_folder`. The time since the last step counts for the alerts of one `is_followed`.
    """
    if record.metrics is None:
        raise DataError(f"{record.name} keeps no metrics file: add `file` to trainer.logger to have reports")
    if not record.metrics.is_file():
        raise DataError(f"{record.name} has no metrics yet: {record.metrics} is not there; the first step writes it")
    metrics = read_metrics(record.metrics)
    run = RunData(record.name, metrics, record.config, answer_histories(record.folder))
    last = last_step(run)
    replicas: list[Any] = []
    if record.folder is not None:
        replicas = latest_by_step(read_records(record.folder / REPLICAS_FILE), last)
    goes_on = is_followed and last < record.total_steps
    idle_s = max(0.0, time.time() - record.metrics.stat().st_mtime) if goes_on else 0.0
    return replace(
        run,
        alerts=alert_states([*past_steps(metrics, replicas, idle_s)]),
        profiles=profiles_of(record.folder, metrics, page_folder),
        replicas=replica_points(replicas),
        timeline=read_timeline(record.folder),
    )


def profiles_of(folder: Path | None, metrics: Sequence[dict[str, Any]], page_folder: Path) -> list[Profile]:
    """The profiles that the run has noted, the newest of each name, with links from a page in `page_folder`."""
    seconds = {int(record["step"]): record["data"].get("timing_s/step") for record in metrics}
    records = {str(record["name"]): record for record in read_records(folder / PROFILES_FILE)} if folder else {}
    found = []
    for name, record in records.items():
        [first, *rest] = [int(part) for part in name.split("_")[1:]]
        times = [seconds.get(step) for step in range(first, (rest or [first])[-1] + 1)]
        took = ", ".join(f"step {first + i}: {s:.3g} s" for i, s in enumerate(times) if s is not None)
        links = [(quote(os.path.relpath(file, page_folder)), Path(file).name) for file in record["files"]]
        found.append(Profile(name, took, links))
    return found


def answer_histories(folder: Path | None) -> list[AnswerHistory]:
    """The answers to the first validation prompts, step by step."""
    if folder is None or not (folder / VALIDATION_SAMPLES).is_dir():
        return []
    files = [path for path in (folder / VALIDATION_SAMPLES).glob("*.jsonl") if path.stem.isdigit()]
    histories: dict[tuple[str, str], AnswerHistory] = {}
    for path in sorted(files, key=lambda path: int(path.stem)):
        for row in map(json.loads, path.read_text().splitlines()):
            key = (str(row["input"]), str(row["gts"]))
            history = histories.setdefault(key, AnswerHistory(*key, answers=[]))
            history.answers.append((int(row["step"]), str(row["output"]), row["score"]))
    return list(histories.values())


def last_step(run: RunData) -> int:
    return max((int(record["step"]) for record in run.records), default=0)


def health_lines(run: RunData) -> list[tuple[int, str]]:
    """(step, line) of what the run's metrics say is wrong, as the run itself says it."""
    actor = dict(run.config.get("actor_rollout_ref", {})).get("actor", {})
    check = HealthCheck(actor.get("loss_agg_mode", "token-mean"))
    return [(int(record["step"]), line) for record in run.records for line in check.look(record["data"])]


def summary_of_runs(runs: Sequence[RunData], records: Sequence[RunRecord]) -> dict[str, Any]:
    """The line of figures at the top of the page, per run: step, and score or loss at the first and last step."""
    out: dict[str, Any] = {}
    for run, record in zip(runs, records, strict=True):
        label = f"{run.name}: " if len(runs) > 1 else ""
        out[f"{label}step"] = f"{last_step(run)} of {record.total_steps}" if record.total_steps else last_step(run)
        for name in SCORES:
            values = [float(r["data"][name]) for r in run.records if name in r["data"]]
            if values:
                ends = dict.fromkeys([format_number(values[0]), format_number(values[-1])])
                out[f"{label}{name}"] = " to ".join(ends)
        for step, line in health_lines(run):
            out[f"{label}health, step {step}"] = "; ".join(filter(None, [out.get(f"{label}health, step {step}"), line]))
    return out
