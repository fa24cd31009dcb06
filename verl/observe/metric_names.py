"""What every metric of a run means: the table of metric_names.yaml."""

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

METRIC_NAMES_FILE = Path(__file__).with_name("metric_names.yaml")


@dataclass(frozen=True)
class Metric:
    """One line of the table. `name` may have wildcards: {a,b}, * for one part between slashes, ** for any."""

    name: str
    meaning: str
    unit: str
    healthy: str


@dataclass(frozen=True)
class MetricSection:
    """Metrics that belong together, under a title and perhaps a sentence."""

    title: str
    about: str
    metrics: tuple[Metric, ...]


@functools.cache
def metric_sections() -> tuple[MetricSection, ...]:
    """The whole table, in the order of the file."""
    return tuple(
        MetricSection(
            part["section"],
            part.get("about", ""),
            tuple(Metric(name, *map(str, words)) for name, words in part["metrics"].items()),
        )
        for part in yaml.safe_load(METRIC_NAMES_FILE.read_text(encoding="utf-8"))
    )


def find_metric(name: str) -> Metric | None:
    """The line about the metric `name`; None if the table has none."""
    return next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def spellings(name: str) -> list[str]:
    """The names that a line with {a,b} stands for."""
    pieces = [piece.strip("{}").split(",") if piece[:1] == "{" else [piece] for piece in re.split(r"(\{[^}]*\})", name)]
    return ["".join(parts) for parts in itertools.product(*pieces)]


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], Metric], ...]:
    wildcards = {r"\*\*": r".+", r"\*": r"[^/]+"}
    return tuple(
        (re.compile(re.sub(r"\\\*\\\*|\\\*", lambda found: wildcards[found[0]], re.escape(spelling))), metric)
        for section in metric_sections()
        for metric in section.metrics
        for spelling in spellings(metric.name)
    )
