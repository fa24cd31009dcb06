"""Curves of one or several runs as the geometry of small SVG drawings."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl.observe.trackers import format_number

MAX_POINTS = 600  # per line; more would not be visible
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 440, 200, 54, 14, 12, 26
GEOMETRY = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": WIDTH - RIGHT, "bottom": HEIGHT - BOTTOM}
NOISE = 0.03  # an estimate of a KL may be below 0 by this share of its highest value
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """One run's values of a metric."""

    run: int
    path: str
    smooth_path: str
    dots: list[tuple[float, float, str]]
    last: str


@dataclass(frozen=True)
class Curve:
    """A metric over steps, with its SVG geometry; `band` is the area between two other metrics."""

    name: str
    lines: list[Line]
    band: str = ""
    y_ticks: list[tuple[float, str]] = field(default_factory=list)
    x_ticks: list[tuple[float, str]] = field(default_factory=list)

    @property
    def last(self) -> str:
        return " | ".join(line.last for line in self.lines)


@dataclass(frozen=True)
class StackedTimes:
    """Seconds of each stage on top of each other, over steps: (stage, path, mean share of the step)."""

    areas: list[tuple[str, str, str]]
    y_ticks: list[tuple[float, str]]
    x_ticks: list[tuple[float, str]]


class Frame:
    """Maps values to pixels, with round numbers at the axes; `from_zero` starts at 0, below which little is noise."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], from_zero: bool = False):
        low, high = min(ys), max(ys)
        if from_zero and low >= -NOISE * abs(high):
            low, high = 0.0, max(high, 0.0)
        ticks = nice_ticks(low, high)
        self.x_low, self.x_high, self.y_low, self.y_high = min(xs), max(xs), ticks[0], ticks[-1]
        self.y_ticks = [(self.pixel(self.x_low, y)[1], tick_label(y)) for y in ticks]
        ends = dict.fromkeys((self.x_low, self.x_high))
        self.x_ticks = [(self.pixel(x, self.y_low)[0], format_number(x)) for x in ends]

    def pixel(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x_low) / (self.x_high - self.x_low) if self.x_high > self.x_low else 0.5
        up = max(0.0, (y - self.y_low) / (self.y_high - self.y_low))
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    def path(self, points: Points) -> str:
        return svg_path([self.pixel(x, y) for x, y in points])

    def area(self, low: Points, high: Points) -> str:
        return self.path([*high, *reversed(low)]) + " Z"


def make_curve(
    name: str, runs: Mapping[int, Points], band: tuple[Points, Points] | None = None, shown: Points = ()
) -> Curve:
    """The values of each run, and a running mean of 20 or more; the axes reach to the points `shown` too."""
    runs = {run: downsample(list(points)) for run, points in runs.items()}
    edges = [downsample(list(edge)) for edge in band] if band else []
    everything = [point for points in [*runs.values(), *edges, shown] for point in points]
    is_kl = "kl" in re.split("[/_]", name)  # whose distance from 0 is what it says
    frame = Frame([x for x, _ in everything], [y for _, y in everything], from_zero=is_kl)
    lines = []
    for run, points in runs.items():
        ys = [y for _, y in points]
        means = zip([x for x, _ in points], running_mean(ys), strict=True) if len(ys) >= 20 else []
        dots = [(*frame.pixel(x, y), f"step {format_number(x)}: {format_number(y)}") for x, y in points]
        lines.append(Line(run, frame.path(points), frame.path(list(means)), dots, format_number(ys[-1])))
    return Curve(name, lines, frame.area(*edges) if edges else "", frame.y_ticks, frame.x_ticks)


def stack_times(stages: Mapping[str, Points]) -> StackedTimes | None:
    """`stages`: seconds of each stage by step. None when there is nothing to draw."""
    by_stage = {name: dict(points) for name, points in stages.items() if any(y > 0 for _, y in points)}
    steps = sorted({x for points in by_stage.values() for x in points})
    if not steps:
        return None
    drawn = [x for x, _ in downsample([(x, 0.0) for x in steps])]
    heights = {name: smooth([points.get(x, 0.0) for x in drawn]) for name, points in by_stage.items()}
    frame = Frame(drawn, [0.0, *(sum(column) for column in zip(*heights.values(), strict=True))])
    seconds = {name: sum(points.values()) for name, points in by_stage.items()}
    low, areas = [0.0] * len(drawn), []
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        high = [base + height for base, height in zip(low, heights[name], strict=True)]
        area = frame.area(list(zip(drawn, low, strict=True)), list(zip(drawn, high, strict=True)))
        areas.append((name, area, f"{seconds[name] / sum(seconds.values()):.0%}"))
        low = high
    return StackedTimes(areas, frame.y_ticks, frame.x_ticks)


def downsample(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of the points, evenly spaced, including the first and the last."""
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


def smooth(values: list[float]) -> list[float]:
    """The running mean of 20 values or more; fewer are left as they are."""
    return running_mean(values) if len(values) >= 20 else values


def nice_ticks(low: float, high: float) -> list[float]:
    """3 to 8 round numbers that enclose [low, high]."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # equal except for rounding
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if high else (0.0, 1.0)
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
