"""One HTML file about a run: curves, samples before and after, config. Opens offline, in light and dark."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.observe.trackers import format_number
from verl.utils.paths import atomic_write_text

MAX_POINTS = 600  # per curve; more would not be seen
HEADLINE_PREFIXES = ("val-core/", "critic/score/mean", "critic/rewards/mean", "train/loss", "val/loss")


@dataclass(frozen=True)
class AnswerComparison:
    """One problem and what the model answered, before and after training."""

    prompt: str
    before: str
    after: str
    ground_truth: str = ""
    before_score: float | None = None
    after_score: float | None = None


@dataclass(frozen=True)
class Curve:
    """A metric over steps, with the geometry of its drawing."""

    name: str
    points: list[tuple[float, float]]
    path: str = ""
    smooth_path: str = ""
    dots: list[tuple[float, float, str]] = field(default_factory=list)
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    x_ticks: list[tuple[float, str]] = field(default_factory=list)
    last: str = ""


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 200, 54, 14, 12, 26


def write_report(
    path: Path | str,
    title: str,
    records: Sequence[Mapping[str, Any]],
    samples: Sequence[AnswerComparison] = (),
    config: Mapping[str, Any] | None = None,
    summary: Mapping[str, Any] | None = None,
) -> Path:
    """Write the report to `path`. `records` are lines of metrics.jsonl, `{"step": ..., "data": {...}}`.

    `summary` are the few facts at the top (label -> value); `config` may be nested or flat. Everything is escaped.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    headline, groups = group_curves(metric_points(records))
    facts = {label: str(value) for label, value in (summary or {}).items()}
    page = environment.get_template("report.html.j2").render(
        title=title,
        facts=facts,
        headline=headline,
        groups=groups,
        samples=list(samples),
        config=sorted(flatten(config or {}).items()),
        width=WIDTH,
        height=HEIGHT,
        left=LEFT,
        right=WIDTH - RIGHT,
        bottom=HEIGHT - BOTTOM,
    )
    atomic_write_text(Path(path), page)
    return Path(path)


def metric_points(records: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Metric name -> finite (step, value) points; the last value of a step counts."""
    found: dict[str, dict[float, float]] = {}
    for record in records:
        for name, value in record["data"].items():
            if math.isfinite(float(value)):
                found.setdefault(name, {})[float(record["step"])] = float(value)
    return {name: sorted(points.items()) for name, points in found.items()}


def group_curves(points: Mapping[str, list[tuple[float, float]]]) -> tuple[list[Curve], dict[str, list[Curve]]]:
    """(the curves people open the report for, all others by the first part of their name)."""
    headline: list[Curve] = []
    groups: dict[str, list[Curve]] = {}
    for name in sorted(points):
        if name.startswith("training/"):
            continue
        curve = make_curve(name, points[name])
        same = name == "critic/rewards/mean" and points[name] == points.get("critic/score/mean")
        if name.startswith(HEADLINE_PREFIXES) and not same:
            headline.append(curve)
        else:
            groups.setdefault(name.split("/")[0], []).append(curve)
    headline.sort(
        key=lambda curve: next(i for i, prefix in enumerate(HEADLINE_PREFIXES) if curve.name.startswith(prefix))
    )
    return headline, dict(sorted(groups.items()))


def make_curve(name: str, points: list[tuple[float, float]]) -> Curve:
    """A curve with its SVG geometry: the values, and a running mean where they are many."""
    points = downsample(points)
    ys = [y for _, y in points]
    y_ticks = nice_ticks(min(ys), max(ys))
    y_low, y_high = y_ticks[0], y_ticks[-1]
    x_low, x_high = points[0][0], points[-1][0]

    def to_pixel(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        up = (y - y_low) / (y_high - y_low)
        x_pixel = LEFT + across * (WIDTH - LEFT - RIGHT)
        y_pixel = HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)
        return round(x_pixel, 1), round(y_pixel, 1)

    smooth = running_mean(ys) if len(ys) >= 20 else []
    xs = [x for x, _ in points]
    return Curve(
        name=name,
        points=points,
        path=svg_path([to_pixel(x, y) for x, y in points]),
        smooth_path=svg_path([to_pixel(x, y) for x, y in zip(xs, smooth, strict=False)]),
        dots=[(*to_pixel(x, y), f"step {format_number(x)}: {format_number(y)}") for x, y in points],
        y_ticks=[(to_pixel(x_low, y)[1], tick_label(y)) for y in y_ticks],
        x_ticks=[(to_pixel(x, y_low)[0], format_number(x)) for x in dict.fromkeys((x_low, x_high))],
        last=format_number(ys[-1]),
    )


def downsample(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of them, evenly spaced, first and last kept."""
    if len(points) <= MAX_POINTS:
        return points
    return [points[round(i * (len(points) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def running_mean(values: list[float]) -> list[float]:
    """Mean over a centred window of a tenth of the points."""
    half = max(1, len(values) // 20)
    out = []
    for i in range(len(values)):
        window = values[max(0, i - half) : i + half + 1]
        out.append(sum(window) / len(window))
    return out


def nice_ticks(low: float, high: float) -> list[float]:
    """3 to 8 round numbers that enclose [low, high]."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal but for rounding
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def tick_label(value: float) -> str:
    """At most seven characters for common magnitudes: 0.25, 1200, 2.2e-4."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:g}"


def svg_path(pixels: list[tuple[float, float]]) -> str:
    return "M" + " L".join(f"{x:g},{y:g}" for x, y in pixels) if pixels else ""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mapping -> dotted key: value as text."""
    out: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = str(value)
    return out
