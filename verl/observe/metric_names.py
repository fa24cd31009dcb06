"""The meaning of every metric of a run: the table of metric_names.yaml."""

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

METRIC_NAMES_FILE = Path(__file__).with_name("metric_names.yaml")
HEADLINES = {  # a name that ends in "/" stands for all that begin with it
    "val-core/": ("", True),
    "critic/score/mean": ("score", True),
    "critic/rewards/mean": ("reward", True),
    "train/loss": ("loss", True),
    "val/loss": ("val_loss", True),
    "train/rewards/accuracies": ("accuracy", True),
    "val/rewards/accuracies": ("val_accuracy", True),
    "train/rewards/margins": ("margin", True),
    "val/rewards/margins": ("", True),
    "reward/std": ("", True),
    "actor/pg_loss": ("pg_loss", False),
    "distillation/loss": ("distillation", False),
    "actor/kl_loss": ("kl_loss", True),
    "actor/reward_kl_penalty": ("", True),
    "actor/ppo_kl": ("ppo_kl", True),
    "actor/entropy": ("entropy", True),
    "critic/vf_loss": ("vf_loss", False),
    "response_length/mean": ("length", True),
    "response_length/clip_ratio": ("", True),
    "actor/pg_clipfrac": ("", True),
    "actor/grad_norm": ("grad_norm", True),
    "train/grad_norm": ("grad_norm", True),
    "actor/lr": ("lr", False),
    "train/lr": ("lr", False),
    "training/rollout_probs_diff_mean": ("", True),
    "rollout_corr/kl": ("", True),
    "perf/throughput": ("tokens/s", True),
    "train/perf/throughput": ("tokens/s", True),
    "timing_s/step": ("step_s", False),
}
"""Metrics to look at first: the label in the line of a step ("": not there), and whether a report begins with it."""


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


def headline_rank(name: str) -> int | None:
    """Where a metric stands at the beginning of a report; None for all others."""
    matches = (
        i
        for i, (wanted, (_, reported)) in enumerate(HEADLINES.items())
        if reported and (name == wanted or (wanted[-1] == "/" and name.startswith(wanted)))
    )
    return next(matches, None)


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
