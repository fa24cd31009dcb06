"""One HTML file about one or several runs: curves, samples, configuration. Works offline, in light and dark mode."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl.observe import async_timeline
from verl.observe.alerts import AlertState
from verl.observe.async_timeline import AsyncTimeline
from verl.observe.metric_names import headline_rank
from verl.observe.step_records import ReplicaPoints
from verl.observe.svg_curves import (
    GEOMETRY,
    Curve,
    Points,
    StackedTimes,
    make_curve,
    nice_ticks,
    stack_times,
    tick_label,
)
from verl.observe.timers import BESIDE_STEP
from verl.utils.paths import atomic_write_text

BANDS = {f"critic/{name}/mean": (f"critic/{name}/min", f"critic/{name}/max") for name in ("score", "rewards")}
NOT_DRAWN = ("training/global_step", "training/epoch")
NAMES = {"trainer.experiment_name", "trainer.default_local_dir"}  # they differ between any two runs
Answer = tuple[str, float | None]  # and its score


@dataclass(frozen=True)
class AnswerComparison:
    """One problem and the model's answers before and after training."""

    prompt: str
    before: str
    after: str
    ground_truth: str = ""
    before_score: float | None = None
    after_score: float | None = None


@dataclass(frozen=True)
class AnswerHistory:
    """One validation prompt and its answers over training: (step, answer, score)."""

    prompt: str
    ground_truth: str
    answers: list[tuple[int, str, float | None]]


@dataclass(frozen=True)
class Profile:
    """A profiled step, or several: its name (`step_5`), seconds by `timing_s/step`, and (link, text) of its files."""

    name: str
    seconds: str
    files: list[tuple[str, str]]


@dataclass(frozen=True)
class RunData:
    """One run on a page: the lines of its metrics file and its configuration, nested or flat."""

    name: str
    records: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    histories: Sequence[AnswerHistory] = ()
    alerts: Sequence[AlertState] = ()
    profiles: Sequence[Profile] = ()
    replicas: ReplicaPoints = field(default_factory=dict)
    timeline: AsyncTimeline | None = None


def write_report(
    path: Path | str,
    title: str,
    records: Sequence[Mapping[str, Any]],
    samples: Sequence[AnswerComparison] = (),
    config: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """The page of a single run. `records` are lines of its metrics file, `{"step": ..., "data": {...}}`."""
    return write_page(path, title, [RunData("", records, config or {})], samples, summary)


def write_page(
    path: Path | str,
    title: str,
    runs: Sequence[RunData],
    samples: Sequence[AnswerComparison] = (),
    summary: Mapping[str, Any] | None = None,
    refresh_s: int = 0,
) -> Path:
    """Write the page to `path` and return it; several runs are drawn over each other, with what differs on top.

    `summary` is shown first (label -> value). A browser loads the page again every `refresh_s` seconds; 0: never.
    Everything is escaped.
    """
    environment = page_environment()
    headline, groups = group_curves([metric_points(run.records) for run in runs])
    configs = [flatten(run.config) for run in runs]
    page = environment.get_template("report.html.j2").render(
        title=title,
        facts={label: str(value) for label, value in (summary or {}).items()},
        runs=[run.name for run in runs],
        differing=differing_keys(configs),
        headline=headline,
        times=[(run.name, times) for run in runs if (times := stage_times(run.records)) is not None],
        groups=groups,
        alerts=[(run.name, state) for run in runs for state in run.alerts],
        profiles=[(run.name, profile) for run in runs for profile in run.profiles],
        replicas=[
            (run.name, names, [make_curve(name, points) for name, points in sorted(run.replicas.items())])
            for run in runs
            if (names := [f"replica {n}" for n in sorted({n for points in run.replicas.values() for n in points})])
        ],
        timelines=[(run.name, run.timeline) for run in runs if run.timeline is not None],
        line_width=async_timeline.WIDTH,
        samples=list(samples),
        prompts=answers_side_by_side(runs),
        configs=[(run.name, sorted(config.items())) for run, config in zip(runs, configs, strict=True) if config],
        refresh_s=refresh_s,
        **GEOMETRY,
    )
    atomic_write_text(Path(path), page)
    return Path(path)


def page_environment() -> Any:
    """The templates of this folder; what they show is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)


def metric_points(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Metric name -> finite (step, value) points; of several values of a step, the last."""
    values_by_step: dict[str, dict[float, float]] = {}
    for record in records:
        for name, value in record["data"].items():
            if math.isfinite(float(value)):
                values_by_step.setdefault(name, {})[float(record["step"])] = float(value)
    return {name: sorted(points.items()) for name, points in values_by_step.items()}


class GroupedCurves(NamedTuple):
    headline: list[Curve]
    groups: dict[str, list[Curve]]  # all others, by the first part of their name


def group_curves(runs: Sequence[Mapping[str, Points]]) -> GroupedCurves:
    """The curves of a page, the runs of one metric in one drawing."""
    headline: list[tuple[int, Curve]] = []
    groups: dict[str, list[Curve]] = {}
    for name in sorted({name for points in runs for name in points}):
        if name.startswith(NOT_DRAWN):
            continue
        edges = [runs[0].get(edge) for edge in BANDS.get(name, ())] if len(runs) == 1 else []
        band = (edges[0], edges[1]) if len(edges) == 2 and edges[0] and edges[1] else None
        curve = make_curve(name, {i: points[name] for i, points in enumerate(runs) if name in points}, band)
        same = name == "critic/rewards/mean" and all(p.get(name) == p.get("critic/score/mean") for p in runs)
        rank = headline_rank(name)
        if rank is None or same:
            groups.setdefault(name.split("/")[0], []).append(curve)
        else:
            headline.append((rank, curve))
    ranked = [curve for _, curve in sorted(headline, key=lambda item: item[0])]
    return GroupedCurves(ranked, dict(sorted(groups.items())))


def stage_times(records: Sequence[Mapping[str, Any]]) -> StackedTimes | None:
    """The stages of a step by time; what no stage accounts for is called "other"."""
    points = metric_points(records)
    prefix = "timing_s/"
    stages: dict[str, Points] = {
        name.removeprefix(prefix): values
        for name, values in points.items()
        if name.startswith(prefix) and name.count("/") == 1 and name != f"{prefix}step"
    }
    if not stages or f"{prefix}step" not in points:
        return None
    known: dict[float, float] = {}
    for values in (values for name, values in stages.items() if name not in BESIDE_STEP):
        for step, seconds in values:
            known[step] = known.get(step, 0.0) + seconds
    stages["other"] = [(step, max(0.0, s - known.get(step, 0.0))) for step, s in points[f"{prefix}step"]]
    return stack_times(stages)


def answers_side_by_side(runs: Sequence[RunData]) -> list[tuple[str, str, list[tuple[int, list[list[Answer]]]]]]:
    """(prompt, ground truth, (step, answers of each run) by step) of every validation prompt of any run."""
    prompts: dict[tuple[str, str], dict[int, list[list[Answer]]]] = {}
    for number, run in enumerate(runs):
        for history in run.histories:
            rows = prompts.setdefault((history.prompt, history.ground_truth), {})
            for step, answer, score in history.answers:
                rows.setdefault(step, [[] for _ in runs])[number].append((answer, score))
    return [(*prompt, sorted(rows.items())) for prompt, rows in prompts.items()]


def differing_keys(configs: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """(key, value in each run) of every key that differs, less NAMES; empty for one run, or where one is unknown."""
    if len(configs) < 2 or not all(configs):
        return []
    keys = sorted({key for config in configs for key in config} - NAMES)
    sections = {key.rpartition(".")[0] for key in keys}  # empty in one run, with keys in another
    values = {key: [config.get(key, "(not there)") for config in configs] for key in keys}
    return [(key, found) for key, found in values.items() if len(set(found)) > 1 and key not in sections]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """A nested mapping as {dotted key: value as text}."""
    out: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = "null" if value is None else str(value)
    return out


__all__ = [
    "AnswerComparison",
    "AnswerHistory",
    "Profile",
    "RunData",
    "differing_keys",
    "metric_points",
    "nice_ticks",
    "tick_label",
    "write_page",
    "write_report",
]
